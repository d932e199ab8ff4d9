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
# # Does the best learning rate transfer across rank?
#
# The LoRA-Muon paper (arXiv 2606.12921) says that its best learning rate does, and that of AdamW on
# the factors does not. Each pool sweeps the rate of one optimizer at one rank; the best rate is the
# minimum of a parabola through the best tested rate and its neighbours, seed by seed.
#
# Results are read from where `python -m experiments.studies` wrote them, or found now.
# PERSLOT_SETTING chooses the setting.

# %%
import os

from IPython.display import Image, Markdown, display

from experiments import plots, studies
from experiments.studies import lr_across_rank as study

setting = os.environ.get("PERSLOT_SETTING", "full")
record = studies.record_of("lr_across_rank", setting)
print(record["command"], f"({record['seconds']} s)")

# %%
display(Markdown(study.table(record["results"])))

# %%
for figure in study.figures(record["results"]).values():
    display(Image(plots.png(figure)))
