"""`vestige predict`, and a run on somebody's own table from the command line."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest

from tests.support.own_tables import rows, write_table
from tests.support.program import check_refused, plain, run, run_json

pytestmark = pytest.mark.usefixtures("empty_folder")
TRAIN = "train --data t.csv --lot 8 --steps 3 --accountant rdp --device cpu --out run"


def test_from_a_table_to_predictions() -> None:
    write_table(Path("t.csv"))
    result = run(f"{TRAIN} --target ill --evaluate-epsilon 2 --dataset-size 60")
    assert result.exit_code == 0, result.output
    text = plain(result.stdout)
    assert "(exact, not for publication)" in text
    assert re.search(r"loss [\d.]+ on the held-out split \(exact, not for publication\)", text)
    assert re.search(r"noisy accuracy [\d.]+ ± [\d.]+ may be published", text)
    names = {path.name for path in Path("run").iterdir()}
    assert {"model.pt", "model.json", "report.html", "statement.html", "statement.md"} <= names
    assert 'href="statement.html"' in Path("run/report.html").read_text()
    stated = json.loads(Path("run/statement.json").read_text())
    assert (stated["sampler"]["records"], stated["sampler"]["records_declared"]) == (60, True)
    told = json.loads(Path("run/result.json").read_text())
    assert "a standard error of" in Path("run/statement.md").read_text()
    assert told["held_out_release"]["accuracy"] == stated["run"]["held_out_release"]["accuracy"]
    assert "held_out_release" in Path("run/statement.json").read_text()
    # The exact figures stay out of what is signed.
    for name in ("accuracy", "balanced_accuracy", "loss", "metrics", "confusion"):
        released = {"held_out_release": None}
        assert f'"{name}":' not in json.dumps(stated | {"run": stated["run"] | released})
    assert str(told["loss"]) not in Path("run/statement.json").read_text()

    predicted = run("predict run t.csv")
    lines = list(csv.DictReader(predicted.stdout.splitlines()))
    assert len(lines) == len(rows())
    assert set(lines[0]) == {"prediction", "p(no)", "p(yes)"}
    assert run_json("predict run t.csv")["predictions"][0]["prediction"] == lines[0]["prediction"]
    assert "wrote out.csv: 80 predictions" in run("predict run t.csv --out out.csv").stdout
    assert Path("out.csv").read_text() == predicted.stdout


def test_a_file_that_is_written_otherwise_than_the_training_data_is_noticed() -> None:
    write_table(Path("t.csv"))
    assert run(TRAIN).exit_code == 0
    new = rows(3)
    write_table(Path("shouted.csv"), [record | {"town": record["town"].upper()} for record in new])
    said = run("predict run shouted.csv")
    assert (said.exit_code, len(said.stdout.splitlines())) == (0, 4)
    assert plain(said.stderr) == (
        "vestige: no record has one of the declared categories of town: all count as other."
    )
    write_table(Path("unit.csv"), [record | {"age": "52 years"} for record in new])
    check_refused(run("predict run unit.csv"), "the age of record 1 is no number")


def test_regression_shows_its_error_and_predicts_in_its_own_unit() -> None:
    write_table(Path("t.csv"), task="regression", target='"days"')
    result = run(TRAIN)
    assert result.exit_code == 0, result.output
    assert "rmse" in plain(result.stdout) and "mean error" in result.stderr
    assert "accuracy" not in result.stdout
    lines = list(csv.DictReader(run("predict run t.csv").stdout.splitlines()))
    assert list(lines[0]) == ["days"]
    assert "held-out RMSE" in Path("run/report.html").read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--target nothing", "target nothing is no column"),
        ("--task regression", "of t.csv the schema says it"),
        ("--schema none.toml", "has no public schema 'none.toml'"),
        ("--model nothing", "model 'nothing' is unknown"),
        ("--model nothing_here:f", "module 'nothing_here' was not found"),
        ("--dataset-size 3", "lot 8 is larger than the training data of 3 records"),
    ],
)
def test_a_bad_option_about_own_data_is_one_line(options: str, message: str) -> None:
    write_table(Path("t.csv"))
    check_refused(run(f"{TRAIN} {options}"), message)
    assert not Path("run").exists()


def test_a_target_is_for_tables() -> None:
    check_refused(
        run("train --target y"), "target is for tables and image folders, and digits is neither"
    )


def test_the_page_has_the_command_for_a_run_with_these_settings() -> None:
    write_table(Path("t.csv"))
    Path("t.schema.toml").rename("other.toml")
    assert run(f"{TRAIN} --schema {Path('other.toml').absolute()} --target tall").exit_code == 0
    page = Path("run/report.html").read_text()
    assert "--target tall --schema other.toml" in page
    assert str(Path.cwd()) not in page


def test_a_model_of_tables_and_one_of_images_say_which_they_are(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    write_table(Path("t.csv"))
    assert run(TRAIN).exit_code == 0
    for kind in ("cat", "dog"):
        Path("pets", kind).mkdir(parents=True)
        for shade in range(20):
            image.new("RGB", (4, 4), (shade, 9, 9)).save(Path("pets", kind, f"{shade}.png"))
    words = "'pets' is a folder, and this model was trained on a table: give a CSV or parquet file"
    check_refused(run("predict run pets"), words)

    assert run("schema pets").exit_code == 0
    schema = Path("pets.schema.toml")
    schema.write_text(schema.read_text().replace("image = []", "image = [3, 4, 4]"))
    assert run(f"{TRAIN.replace('t.csv', 'pets')} --out shots").exit_code == 0
    check_refused(run("predict shots t.csv"), "is a table, and this model was trained on images")
    lines = list(csv.DictReader(run("predict shots pets").stdout.splitlines()))
    assert len(lines) == 40 and lines[0]["file"] == "cat/0.png"
    assert run_json("predict shots pets/dog/3.png")["predictions"][0]["file"] == "3.png"


def test_a_folder_that_is_no_run_is_one_line() -> None:
    check_refused(run("predict nowhere t.csv"), "has no model.json")


def test_names_that_a_program_for_tables_would_run_are_shown() -> None:
    from vestige.cli.predict import as_csv

    names = {"=cmd|'/c calc'!A0": 0.5, "-1": 0.25, "+49 30": 0.1, "@SUM(A1)": 0.1, "no": 0.05}
    found = [{"file": "-x.png", "prediction": name, "probabilities": names} for name in names]
    lines = list(csv.reader(as_csv(found).splitlines()))
    assert [line[1] for line in lines[1:]] == [
        "'=cmd|'/c calc'!A0", "-1", "'+49 30", "'@SUM(A1)", "no",
    ]  # fmt: skip
    assert lines[1][0] == "'-x.png"
    assert lines[0][2:] == [f"p({name})" for name in names]
    assert "-1.5e-05" in as_csv([{"prediction": {"target": -1.5e-5}}])
