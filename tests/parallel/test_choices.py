"""Links of a run: measured once and kept, the same choices on all ranks, and results that do not mind."""

import json
from dataclasses import replace

import layouts
import pytest
import torch
from ranks import RankError

from outlast.config import Parallel, Run
from outlast.links import Profile, write
from outlast.parallel import links, mesh


def started(folder, parallel, hosts, local_rank):
    """On a rank: choose twice; whether it measured, the choices, what the panel says."""
    grid = mesh.make(parallel, torch.device("cpu"))
    run = replace(Run(), folder=str(folder), parallel=parallel)
    first = links.choose(grid, run, local_rank[grid.rank])
    choices = {name: [one.of("all_reduce", 1 << p) for p in range(4, 24)] for name, one in grid.choices.items()}
    again = links.choose(grid, run, local_rank[grid.rank])
    same = choices == {n: [one.of("all_reduce", 1 << p) for p in range(4, 24)] for n, one in grid.choices.items()}
    crossing = {name for name, axis in grid.axes.items() if axis.link}
    alike = len({id(axis.link) for axis in grid.axes.values() if axis.link}) <= 1
    shared = {name: one.profile.rates for name, one in grid.choices.items()}
    told = links.told(grid, [("tp", "all_reduce"), ("tp", "shift")])
    assert grid.hosts == list(hosts)
    return first, again, same and alike, crossing, shared, told, choices


def test_links_are_measured_once_and_kept(ranks, tmp_path):
    parallel = Parallel(dp_shard=2, tp=2, links="measure")
    told = ranks.run(4, started, tmp_path, parallel, (0, 0, 1, 1), (0, 1, 0, 1))
    for first, again, same, crossing, shared, lines, _ in told:
        assert (first, again, same) == (True, False, True)
        assert crossing == {"dp_shard", "shard", "world", "model"}
        assert shared["dp_shard"] == tuple(rate / 2 for rate in shared["world"])  # two groups of it on each interface
        assert lines[0] == "2 hosts: dp_shard goes between hosts, tp stays inside a host"
        assert lines[1].startswith("tp all-reduce: ")
        assert len(lines) == 2
    assert all(one[-1]["world"] == told[0][-1]["world"] for one in told)
    kept = json.loads((tmp_path / "links.json").read_text())
    assert (kept["record"], kept["hosts"], len(kept["names"])) == ("links", [0, 0, 1, 1], 2)
    # Other hosts: measured anew. Three ranks a host is no multiple of two, and tp then goes between hosts.
    first, *_, crossing, _, lines, _ = ranks.run(4, started, tmp_path, parallel, (0, 0, 0, 1), (0, 1, 2, 0))[0]
    assert first
    assert lines[1] == "tp talks most, and need not go between hosts: start a multiple of 2 ranks on each, not 3"


def test_a_profile_for_other_hosts_is_refused(ranks, tmp_path):
    write(tmp_path / "given.json", Profile((0, 1), 1e-4, 1e9, 1e-4, (1e9, 1e9), sums=1e9))
    parallel = Parallel(tp=2, links=str(tmp_path / "given.json"))
    with pytest.raises(RankError, match=r"for ranks on hosts \[0, 1\], and these are on \[0, 0\]"):
        ranks.run(2, started, tmp_path, parallel, (0, 0), (0, 1))


SLOW = {"few messages": {"message": 1.0}, "few bytes": {"message": 0.0, "together": 0.0}, "trees": {"together": 1.0}}


@pytest.mark.parametrize("other", SLOW)
@pytest.mark.parametrize("name", ["dp_shard 3", "tp 2 + sp x dp_replicate 2"])
def test_a_layout_with_other_algorithms_equals_one_process(ranks, tmp_path, name, other):
    layout = layouts.LAYOUTS[name]
    n = layouts.ranks_of(layout)
    write(tmp_path / "given.json", Profile((0,) * n, 1e-4, 1e9, 1e-4, (1e9,), sums=1e9, **SLOW[other]))
    alone = layouts.put_together([layouts.trained(layouts.words(tmp_path, {}, "alone"))])
    words = layouts.words(tmp_path, layout | {"links": str(tmp_path / "given.json")}, "together")
    kept = layouts.put_together(ranks.run(n, layouts.on_rank, words, limit=120))
    assert max(layouts.furthest(kept, alone).values()) <= 1e-9
