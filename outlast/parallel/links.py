"""Which links the run's axes go over, and the algorithms they take: measured at the first start, or as given.

Another algorithm adds in another order. So that a run stays bitwise repeatable while its layout is the same, what was
measured is kept in its folder, and measured again only where ranks or hosts are others.
"""

import dataclasses
import platform
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from outlast import layout, links
from outlast.comm.link import Link
from outlast.comm.measure import measure
from outlast.config import Run
from outlast.errors import OutlastError, UsageError
from outlast.links import Profile
from outlast.parallel.mesh import Mesh
from outlast.schedules import ALGORITHMS

FILE: Final = "links.json"


def choose(mesh: Mesh, run: Run, local_rank: int) -> bool:
    """Give the axes their choices, if `parallel.links` wants any, and those that cross hosts their common link.

    Args:
        mesh: the grid; all ranks call it.
        run: its folder and `parallel.links`.
        local_rank: number of this rank on its host: the ranks of a host are numbered one after the other.

    Returns:
        Whether the links were measured just now.

    Raises:
        UsageError: the given profile is for other hosts.
        OutlastError: it cannot be read. Every rank tells the same.
    """
    if mesh.world is None:
        return False
    told = mesh.axes["checkpoint"].gather_objects((mesh.rank - local_rank, platform.node()))
    firsts = sorted({first for first, _ in told})
    hosts = tuple(firsts.index(first) for first, _ in told)
    mesh.hosts[:] = hosts
    link = Link()
    for axis in mesh.axes.values():
        if axis.name != "checkpoint" and len({hosts[rank] for rank in axis.ranks}) > 1:
            axis.link = link
    if not run.parallel.links:
        return False
    path = Path(run.folder) / FILE if run.parallel.links == "measure" else Path(run.parallel.links)
    mine = _kept(path, hosts, run.parallel.links == "measure") if mesh.leads else None
    profile = mesh.axes["checkpoint"].gather_objects(mine)[0]
    if isinstance(profile, OutlastError):
        raise profile
    measured = profile is None
    if profile is None:
        profile = measure(hosts, {axis.name: axis for axis in mesh.axes.values()}, mesh.device)
        if mesh.leads:
            links.write(path, profile, [next(name for first, name in told if first == one) for one in firsts])
    for axis in mesh.axes.values():
        if axis.name != "checkpoint":
            axis.choices = links.Choices(_shared(profile, mesh, axis.name), profile.group(axis.ranks), axis.rank)
    return measured


def _kept(path: Path, hosts: tuple[int, ...], measures: bool) -> Profile | OutlastError | None:
    """The profile there is, an error to tell, or nothing where it is to be measured: anew, too, if it was of other hosts."""
    if measures and not path.exists():
        return None
    try:
        profile = links.read(path)
    except OutlastError as error:
        return error
    if profile.hosts == hosts:
        return profile
    return None if measures else UsageError(
        f"the links record is for ranks on hosts {list(profile.hosts)}, and these are on {list(hosts)}",
        fix='give one for these, or set parallel.links to "measure"',
        where=str(path),
        key="parallel.links",
    )  # fmt: skip


def _shared(profile: Profile, mesh: Mesh, axis: str) -> Profile:
    """The links as one group along an axis has them: the others along it use them at the same time."""
    if axis == "world":
        return profile
    crossing: Counter[int] = Counter()
    for group in layout.groups(mesh.parallel, axis):
        on = {profile.hosts[rank] for rank in group}
        crossing.update(on if len(on) > 1 else ())
    rates = tuple(rate / max(1, crossing[host]) for host, rate in enumerate(profile.rates))
    return dataclasses.replace(profile, rates=rates)


def told(mesh: Mesh, ops: Iterable[tuple[str, str]]) -> list[str]:
    """What there is to say of links: where each axis goes, whether it need go there, and what is taken for which sizes.

    Args:
        mesh: the grid, its axes with their choices.
        ops: axes and collectives that the run has.
    """
    if not mesh.hosts:
        return []
    over = [name for name in layout.AXES if name in mesh.axes]
    lines = [
        f"{max(mesh.hosts) + 1} host{'s' if max(mesh.hosts) else ''}: "
        + ", ".join(
            f"{name} {'goes between hosts' if mesh.axes[name].link else 'stays inside a host'}" for name in over
        )
    ]
    most, talkative = max(Counter(mesh.hosts).values()), over[-1]
    degree = layout.degrees(mesh.parallel)[talkative]
    groups = layout.groups(mesh.parallel, talkative)
    if degree <= most and any(len({mesh.hosts[rank] for rank in group}) > 1 for group in groups):
        lines.append(
            f"{talkative} talks most, and need not go between hosts: start a multiple of {degree} ranks on each, not {most}"
        )
    for axis, op in ops:
        choices = mesh.choices.get(axis)
        if choices and op in ALGORITHMS:
            rows = (
                f"{row.algorithm} to {_size(size)} in {1000 * row.seconds:.3g} ms"
                for size, row in choices.table(op, [1 << power for power in range(10, 27, 2)])
            )
            lines.append(f"{axis} {op.replace('_', '-')}: {', '.join(rows)}")
    return lines


def _size(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"
