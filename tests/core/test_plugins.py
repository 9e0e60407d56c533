"""A plugin is found by the name of its file; there is no registry."""

from __future__ import annotations

from pathlib import Path

import pytest

from nereus.core import SettingsError, plugins

PAYBACK = """
from dataclasses import dataclass

@dataclass(frozen=True)
class PayBack:
    margin: float = 0.5
    required: int = 0

    def __post_init__(self):
        if self.margin < 0:
            raise TypeError("margin is below 0")
"""


@pytest.fixture(scope="module", autouse=True)
def rules(tmp_path_factory: pytest.TempPathFactory) -> object:
    folder = tmp_path_factory.mktemp("plugins")
    package = folder / "rulebook"
    (package / "nested").mkdir(parents=True)
    for name, text in {
        "__init__": "",
        "pay_back": PAYBACK,
        "never": "class Never: ...",
        "_shared": "",
        "nested/__init__": "",
    }.items():
        (package / f"{name}.py").write_text(text)
    patch = pytest.MonkeyPatch()
    patch.syspath_prepend(str(folder))
    yield
    patch.undo()


def test_files_are_the_list_without_helpers_and_packages() -> None:
    assert plugins.names("rulebook") == ("never", "pay_back")


def test_options_are_the_fields_of_the_class() -> None:
    assert plugins.make("rulebook", "pay_back", {"margin": 0.7}).margin == 0.7


def test_an_unknown_name_lists_the_choices_and_the_nearest() -> None:
    with pytest.raises(
        SettingsError, match=r"rulebook 'nevr' is unknown, valid: never, pay_back; did you mean 'never'\?"
    ):
        plugins.make("rulebook", "nevr", {})


def test_an_unknown_option_names_the_nearest() -> None:
    with pytest.raises(SettingsError, match=r"pay_back: unknown option 'margn', valid: margin, required; did you mean"):
        plugins.make("rulebook", "pay_back", {"margn": 1})


def test_an_option_the_plugin_refuses_is_a_settings_error() -> None:
    with pytest.raises(SettingsError, match="margin is below 0"):
        plugins.make("rulebook", "pay_back", {"margin": -1})


def test_a_dotted_name_loads_the_users_own_class() -> None:
    made = plugins.make("nereus.core", "rulebook.pay_back.PayBack", {"required": 3})
    assert made.required == 3


@pytest.mark.parametrize("name", ["rulebook.missing.Rule", "rulebook.never.Missing"])
def test_a_dotted_name_that_does_not_exist_is_a_settings_error(name: str) -> None:
    with pytest.raises(SettingsError, match=f"cannot load '{name}'"):
        plugins.load("rulebook", name)


def test_the_class_is_the_camel_case_of_the_file() -> None:
    assert plugins.camel("every_n") == "EveryN"


def test_every_option_is_checked_against_the_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "later"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "fresh.py").write_text("class Fresh: ...")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert type(plugins.make("later", "fresh", {})).__name__ == "Fresh"
