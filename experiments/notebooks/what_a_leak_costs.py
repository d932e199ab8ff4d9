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
# # What a leak costs
#
# A slot that is not scrubbed hands its old tenant's moments, step clock or place in the schedule to
# the next one. Here that is done on purpose, in some slots of a pool, next to clean ones that are
# equal seed by seed.
#
# Results are read from where `python -m experiments.studies` wrote them, or found now.
# PERSLOT_SETTING chooses the setting.

# %%
import os

from IPython.display import Image, Markdown, display

from experiments import plots, studies
from experiments.studies import what_a_leak_costs as study

setting = os.environ.get("PERSLOT_SETTING", "full")
record = studies.record_of("what_a_leak_costs", setting)
print(record["command"], f"({record['seconds']} s)")

# %%
display(Markdown(study.table(record["results"])))

# %%
for figure in study.figures(record["results"]).values():
    display(Image(plots.png(figure)))
