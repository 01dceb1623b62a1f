"""A renamed argument warns for one minor version, then is an error that names the new one."""

import warnings

import pytest

import offbeat
from offbeat import deprecation
from offbeat.recipes import text

local_sgd = deprecation.renamed("0.2", period="every")(offbeat.local_sgd)


@pytest.fixture(autouse=True)
def _renamed_in_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "RECIPES", [local_sgd])


@pytest.mark.parametrize("version", ["0.1.1.dev7", "0.2.0", "0.2.9"])
def test_a_former_name_warns_in_code_and_in_text(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deprecation, "__version__", version)
    expected = offbeat.local_sgd(every=4)
    match = r"local_sgd: period= is now every=; .* is an error from version 0\.3 on"
    with pytest.warns(FutureWarning, match=match) as caught:
        assert local_sgd(period=4) == expected  # type: ignore[call-arg]
    assert caught[0].filename == __file__
    with pytest.warns(FutureWarning, match=match):
        assert offbeat.algorithm("local_sgd(period=4)") == expected
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert offbeat.algorithm("local_sgd(every=4)") == expected


@pytest.mark.parametrize("version", ["0.3.0", "1.0.0"])
def test_a_former_name_is_an_error_in_later_versions(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deprecation, "__version__", version)
    for use in (lambda: local_sgd(period=4), lambda: offbeat.algorithm("local_sgd(period=4)")):  # type: ignore[call-arg]
        with pytest.raises(ValueError, match=r"period= is now every=.*write every="):
            use()
