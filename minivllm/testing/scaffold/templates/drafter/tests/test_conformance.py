from minivllm.testing import DrafterConformance


class TestMyPlugin(DrafterConformance):
    plugin = "my-plugin/my-plugin"

    def test_it_goes_on_as_the_last_time(self):
        drafter = self.build(*self.context())
        found = self.drafts(drafter, [[5, 6, 7, 8, 5]], 3)
        expected = [[6, 7, 8]]
        assert found == expected
        got = self.drafts(drafter, [[1, 2, 3]], 3)
        assert got == [[]]
