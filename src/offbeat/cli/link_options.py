"""The options of links, which ``offbeat lab``, ``compare`` and ``plan`` share."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, cast

import typer

from offbeat.kit.terminal import exit_codes
from offbeat.lab.network.links import LinkOptions

OPTIONS: Mapping[str, Any] = {
    "up": Annotated[
        str | None,
        typer.Option(metavar="RATE", help="Rate at which a node sends. Default: that of --rate."),
    ],
    "down": Annotated[
        str | None,
        typer.Option(
            metavar="RATE", help="Rate at which a node receives. Default: that of --rate."
        ),
    ],
    "latency": Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Time of a packet from one node to another, half a round trip, for example 50ms.",
        ),
    ],
    "jitter": Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="How much the latency varies at most, either way, for example 5ms. Packets keep "
            "their order.",
        ),
    ],
    "loss": Annotated[
        str | None,
        typer.Option(
            metavar="PERCENT", help="Share of packets that are lost at random, for example 0.1%."
        ),
    ],
    "sites": Annotated[
        str | None,
        typer.Option(
            metavar="N,N[,N...]",
            help="Nodes of each site, for example 4,4,6, instead of --nodes. --jitter and --loss "
            "then apply between sites.",
        ),
    ],
    "between": Annotated[
        list[str] | None,
        typer.Option(
            metavar="[A-B:]TIME[@RATE]",
            help="Latency and rate of the link between two sites, shared by their nodes: "
            "60ms@200mbit for all pairs, 0-2:75ms@100mbit for one. Repeatable.",
        ),
    ],
    "encrypt": Annotated[
        bool, typer.Option("--encrypt", help="Let nodes talk through WireGuard, which is needed.")
    ],
}
ALL = tuple(OPTIONS)
NEAR = LinkOptions()  # nothing given


def with_links(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command options of links in the place of its parameter ``far``, which gets them."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def main(**given: Any) -> None:
            texts = {name: given.pop(name) for name in names}
            with exit_codes("interrupted"):
                far = parse_links(texts)
            command(**given, far=far)

        parameters = list(inspect.signature(command, eval_str=True).parameters.values())
        place = [parameter.name for parameter in parameters].index("far")
        parameters[place : place + 1] = map(_parameter, names)
        main.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return main

    return decorate


def parse_links(texts: Mapping[str, Any]) -> LinkOptions:
    """Return what was given; sites as numbers."""
    far = cast(LinkOptions, dict(texts))
    expected = "the number of nodes of each site, separated by commas; for example 4,4,6"
    sites = texts["sites"]
    far["sites"] = [] if sites is None else parse_numbers("sites", sites, expected)
    far["between"] = texts["between"] or ()
    return far


def parse_numbers(name: str, text: str, expected: str) -> list[int]:
    """Parse whole numbers separated by commas."""
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise ValueError(f"{name}: got {text!r}, expected {expected}") from None


def _parameter(name: str) -> inspect.Parameter:
    default = False if name == "encrypt" else None
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Parameter(name, kind, default=default, annotation=OPTIONS[name])
