"""The speeds of passes for a plan, measured on the GPU that has trained."""

from offbeat.plan import Speeds


def test_every_pass_over_memory_is_faster_on_the_gpu() -> None:
    on_gpu, on_cpu = Speeds.measure("cuda"), Speeds.measure("cpu")
    for name, seconds in vars(on_gpu).items():
        assert 0 < seconds < vars(on_cpu)[name], name
