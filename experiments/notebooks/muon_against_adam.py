# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Muon against Adam per adapter
#
# Each slot of a pool is one learning rate and one seed, so the whole sweep of an optimizer costs a
# single run. All optimizers see the same data, seed by seed, with their defaults in `jax_impl`, no
# weight decay, 10% warm-up and a cosine decay.
#
# Results are read from where `python -m experiments.studies` wrote them, or found now.
# PERSLOT_SETTING chooses the setting.

# %%
import os

from IPython.display import Image, Markdown, display

from experiments import plots, studies
from experiments.studies import muon_against_adam as study

setting = os.environ.get("PERSLOT_SETTING", "full")
record = studies.record_of("muon_against_adam", setting)
print(record["command"], f"({record['seconds']} s)")

# %%
display(Markdown(study.table(record["results"])))

# %%
for figure in study.figures(record["results"]).values():
    display(Image(plots.png(figure)))
