from my_plugin.options import Options
from my_plugin.plugin import MyPlugin

from minivllm.testing import SchedulerConformance
from minivllm.testing.sim import Clock, request, sim_engine


class TestMyPlugin(SchedulerConformance):
    plugin = "my-plugin/my-plugin"


def test_a_short_request_overtakes_a_long_one():
    clock = Clock()
    engine = sim_engine(slots=1, policy=lambda none, ctx: MyPlugin(Options(), ctx))  # on a device without a model
    first, long, short = (
        request(engine, name, [1, 2, 3], arrival=clock.now, max_tokens=n, ignore_eos=True)
        for name, n in (("first", 5), ("long", 60), ("short", 5))
    )
    while engine.busy:
        clock.turn(engine)
    assert first.finished < short.finished < long.finished
