from my_plugin.plugin import MyPlugin

from minivllm.plugin import ReplicaLoad, RoutedRequest, RouterContext
from minivllm.testing import RouterConformance


class TestMyPlugin(RouterConformance):
    plugin = "my-plugin/my-plugin"


def test_the_replica_with_the_fewest_requests_is_chosen():
    router = MyPlugin(None, RouterContext(2))
    request = RoutedRequest(tokens=100)
    found = router.choose(request, [ReplicaLoad(0, requests=3), ReplicaLoad(1, requests=1)])
    assert found == 1
