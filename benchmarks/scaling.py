"""A scaling law of runs that lie in folders, as `benchmarks.recipe` leaves them, and its prediction for another depth.

    python -m benchmarks.scaling /tmp/nanodag-recipe/depth*-pocket-* --depth 4 --tokens 1536000

`nanodag scale` trains the points too and takes the same law. Each folder has the stage's job.json and result.json; all
must be of one tokenizer, one data mixture and one recipe, which is not checked here.
"""

import argparse
import json
from pathlib import Path

from nanodag.config.dial import Shape, num_parameters, shape_of
from nanodag.sweep.scaling import ScalingLaw, estimated


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="+")
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--depth", type=int, default=4, help="which is predicted")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1_536_000], help="its horizons")
    options = parser.parse_args()
    points = [_point(folder, options.vocabulary) for folder in options.folder]
    law = ScalingLaw(*map(list, zip(*points, strict=True)))
    print("| parameters | tokens | measured | by the law | off |\n|---|---|---|---|---|")
    for parameters, tokens, loss in sorted(points):
        fitted = law.losses(parameters, tokens)[0]
        print(f"| {parameters:,} | {tokens:,} | {loss:.4f} | {fitted:.4f} | {100 * (loss / fitted - 1):+.2f} % |")
    for name, (value, low, high) in law.numbers.items():
        print(f"{name}: {value:.4g} ({low:.4g} to {high:.4g})")
    print(f"Spread about the law: {100 * law.spread:.2f} %")
    parameters = _size(shape_of(options.depth), options.vocabulary)
    for tokens in options.tokens:
        value, low, high = estimated(law.losses(parameters, tokens))
        print(f"Depth {options.depth}, {parameters:,} parameters, {tokens:,} tokens:", end=" ")
        print(f"{value:.4f} ({low:.4f} to {high:.4f})")
    value, low, high = law.best_ratio(parameters)
    print(f"Best tokens a parameter at that size: {value:.3g} ({low:.3g} to {high:.3g})")


def _point(folder: Path, vocabulary: int) -> tuple[int, int, float]:
    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))["config"]
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    shape = Shape(**{field: job["shape"][field] for field in Shape.__dataclass_fields__})
    return _size(shape, vocabulary), result["cost"]["tokens"], result["metrics"]["validation_bits_per_byte"]


def _size(shape: Shape, vocabulary: int) -> int:
    return num_parameters(shape, vocabulary)["matrices"] + vocabulary * shape.width


if __name__ == "__main__":
    main()
