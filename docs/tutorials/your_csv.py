# %% [markdown]
# # Your own table
#
# From a CSV to a private model with a statement, by commands. [Start](../start.md) explains each of
# them; here they are run. The table is made up.

# %%
import csv
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

EPOCHS = int(os.environ.get("TUTORIAL_EPOCHS", "20"))
os.chdir(tempfile.mkdtemp())
# The command of the environment that runs this page.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
os.environ.pop("FORCE_COLOR", None)  # a notebook is no terminal: a line for each epoch, no bar

random.seed(7)
with Path("patients.csv").open("w", newline="") as file:
    writer = csv.writer(file)
    writer.writerow(["age", "bmi", "smoker", "outcome"])
    for _ in range(2000):
        age, bmi = random.randint(18, 95), round(random.gauss(27, 5), 1)
        smoker = random.choice(["yes", "no", "no"])
        risk = (age - 55) / 15 + (bmi - 27) / 6 + (smoker == "yes")
        writer.writerow([age, bmi, smoker, "ill" if random.gauss(0, 1) < risk - 1 else "well"])


def run(command: str) -> None:
    """A command as in a terminal."""
    print("$", command)
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(command, shell=True, text=True, **both)
    print(done.stdout)
    done.check_returncode()


# %% [markdown]
# ## Declare
#
# The draft has the names and kinds of the columns. Ranges and categories are yours to declare, from
# a codebook: the largest age in a table is somebody's age.

# %%
run("vestige schema patients.csv --target outcome")

# %%
Path("patients.schema.toml").write_text("""
target = "outcome"

[columns.age]
kind = "number"
range = [18, 100]

[columns.bmi]
kind = "number"
range = [10, 60]

[columns.smoker]
kind = "category"
categories = ["no", "yes"]

[columns.outcome]
kind = "category"
categories = ["well", "ill"]
""")

# %% [markdown]
# ## Choose, train, predict

# %%
run("vestige suggest --data patients.csv --epsilon 3")

# %%
run(
    "vestige train --data patients.csv --epsilon 3 --delta 1e-5 --lot 128 --lr 0.5 "
    f"--epochs {EPOCHS} --evaluate-epsilon 1 --tuning none --out first"
)

# %%
run("vestige predict first patients.csv | head -5")

# %% [markdown]
# ## What may be said about it
#
# The statement says what is covered and what is not. The exact figures of the held-out records are
# not covered and are not in it; the noisy one is charged to those records' own ledger.

# %%
statement = json.loads(Path("first/statement.json").read_text())
print(json.dumps(statement["guarantee"], indent=1)[:600])

# %% [markdown]
# **How far this guarantee goes.** One row of the table is one record. The schema is public and goes
# with the model. Every further run on the same table adds to what is spent: keep them on one ledger
# with `--ledger all.jsonl`.
