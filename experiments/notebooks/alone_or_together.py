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
# # Alone or together
#
# A tenant should train in a busy pool exactly as it would alone. Here some do both, and every
# byte of their weights is compared. In a pool of one slot, which is another compiled program,
# sums may be rounded in another order; a run that starts with one last bit of each weight changed
# shows what rounding of that size becomes by itself.
#
# Results are read from where `python -m experiments.studies` wrote them, or found now.
# PERSLOT_SETTING chooses the setting.

# %%
import os

from IPython.display import Image, Markdown, display

from experiments import plots, studies
from experiments.studies import alone_or_together as study

setting = os.environ.get("PERSLOT_SETTING", "full")
record = studies.record_of("alone_or_together", setting)
print(record["command"], f"({record['seconds']} s)")

# %%
display(Markdown(study.table(record["results"])))

# %%
for figure in study.figures(record["results"]).values():
    display(Image(plots.png(figure)))
