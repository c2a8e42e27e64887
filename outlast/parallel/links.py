"""Which links the run's axes go over, and the algorithms they take: measured at the first start, or as given.

Another algorithm adds in another order. So that a run stays bitwise repeatable while its layout is the same, what was
measured is kept in its folder, and measured again only where ranks or hosts are others.
"""

import dataclasses
import platform
from collections import Counter
from pathlib import Path
from typing import Final

from outlast import layout, links
from outlast.comm.link import Link
from outlast.comm.measure import measure
from outlast.config import Run
from outlast.errors import OutlastError, UsageError
from outlast.links import Profile
from outlast.parallel.mesh import Mesh

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
        profile = measure(hosts, mesh.axes, mesh.device)
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
    if axis not in layout.AXES:
        return profile
    groups = {tuple(layout.along(mesh.parallel, rank, axis)) for rank in range(len(profile.hosts))}
    crossing: Counter[int] = Counter()
    for group in groups:
        on = {profile.hosts[rank] for rank in group}
        crossing.update(on if len(on) > 1 else ())
    rates = tuple(rate / max(1, crossing[host]) for host, rate in enumerate(profile.rates))
    return dataclasses.replace(profile, rates=rates)


def told(mesh: Mesh) -> list[tuple[str, str]]:
    """What the opening panel says of links: where each axis goes, and what it takes for which sizes."""
    lines = []
    for name, axis in mesh.axes.items():
        if name in ("checkpoint", "model") or axis.hosts is None:
            continue
        lines.append((f"{name} goes", "over the network, between " f"{axis.hosts} hosts" if axis.hosts > 1 else "inside a host"))
    return lines
