"""docs/zigzag.svg: who does which of the work of causal attention, drawn from outlast/parallel/zigzag.py.

python docs/zigzag.py
"""

from pathlib import Path
from typing import Final

from outlast.parallel import zigzag

COLOURS: Final = ("#2f6f9f", "#d9822b", "#5b9a4b", "#a6428f")
CELL: Final = 9
TOKENS: Final = 32


def owners(documents: tuple[int, ...], ranks: int) -> list[int]:
    """The rank of each token."""
    owner = [0] * sum(documents)
    for rank, mine in enumerate(zigzag.stretches(documents, ranks)):
        for one in mine:
            owner[one.start : one.stop] = [rank] * (one.stop - one.start)
    return owner


def panel(x: int, title: str, owner: list[int], documents: tuple[int, ...]) -> str:
    """One triangle: a row a query, a column a key, coloured by the query's rank; its ranks' shares of the work below."""
    document = [i for i, n in enumerate(documents) for _ in range(n)]
    drawn, work = [f'<text x="{x}" y="22" font-weight="bold">{title}</text>'], [0] * len(COLOURS)
    for query, rank in enumerate(owner):
        keys = [key for key in range(query + 1) if document[key] == document[query]]
        work[rank] += len(keys)
        drawn.append(
            f'<rect x="{x + keys[0] * CELL}" y="{36 + query * CELL}" width="{len(keys) * CELL}" height="{CELL}" '
            f'fill="{COLOURS[rank]}" stroke="white" stroke-width="0.6"/>'
        )
    bottom = 36 + len(owner) * CELL + 18
    for rank, mine in enumerate(work):
        drawn.append(
            f'<text x="{x + rank * 74}" y="{bottom}" fill="{COLOURS[rank]}">rank {rank}: {mine / sum(work):.0%}</text>'
        )
    return "\n".join(drawn)


def picture() -> str:
    """Three panels: in stretches, zigzag, and zigzag inside each of three documents."""
    ranks, one, three = len(COLOURS), (TOKENS,), (6, 17, 9)
    width, height = 3 * (TOKENS * CELL + 40) + 20, TOKENS * CELL + 76
    panels = (
        panel(20, "one stretch a rank", [i * ranks // TOKENS for i in range(TOKENS)], one),
        panel(60 + TOKENS * CELL, "zigzag", owners(one, ranks), one),
        panel(100 + 2 * TOKENS * CELL, f"documents of {', '.join(map(str, three))}", owners(three, ranks), three),
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" font-family="sans-serif" '
        f'font-size="12">\n<rect width="{width}" height="{height}" fill="white"/>\n' + "\n".join(panels) + "\n</svg>\n"
    )


if __name__ == "__main__":
    (Path(__file__).parent / "zigzag.svg").write_text(picture())
