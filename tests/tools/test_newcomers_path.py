"""The script that times a newcomer's steps takes its commands from the page."""

from tools import newcomers_path


def test_the_first_program_is_compiled_for_one_step(tmp_path, capsys):
    own = newcomers_path.programs()[0]
    exec(newcomers_path.compiled(own).replace("fullgraph=True", "backend='eager'"), {})
    assert capsys.readouterr().out.splitlines() == ["step  0: loss 1.348"]


def test_every_step_has_its_files(tmp_path):
    steps = newcomers_path.prepare(tmp_path)
    scripts = {word for command in steps.values() for word in command if word.endswith(".py")}
    assert scripts == {path.name for path in tmp_path.iterdir()}
