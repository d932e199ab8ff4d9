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
# # A mixed pool
#
# Tenants of four optimizer families, two ranks, two batch sizes, three schedules and several
# lengths of stay share a pool with half as many slots, and then train one after another.
#
# Results are read from where `python -m experiments.studies` wrote them, or found now.
# PERSLOT_SETTING chooses the setting.

# %%
import os

from IPython.display import Image, Markdown, display

from experiments import plots, studies
from experiments.studies import mixed_pool as study

setting = os.environ.get("PERSLOT_SETTING", "full")
record = studies.record_of("mixed_pool", setting)
print(record["command"], f"({record['seconds']} s)")

# %%
display(Markdown(study.table(record["results"])))

# %%
for figure in study.figures(record["results"]).values():
    display(Image(plots.png(figure)))
