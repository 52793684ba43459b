"""Prints how many generated cases test each operation: ``PYTHONPATH=.:tests python -m support.count_cases``."""

from collections import Counter

import minigrad as mg
from support import cases as generated


def counts() -> dict[str, Counter]:
    """For each kind of test, how many cases it has of each operation, from the lists that the tests run over."""

    def per_operation(cases, weight=lambda case: 1):
        found = Counter()
        for case in cases:
            found[case.operation.name] += weight(case)
        return found

    def empties(case):
        return len(generated.emptied(generated.opened(case.inputs()[0])[0]))

    return {
        "numpy": per_operation(generated.IN_NUMPY),
        "torch": per_operation(generated.IN_TORCH),
        "order 1": per_operation(generated.FINITE),
        "order 2": per_operation(generated.FINITE),
        "float16": per_operation(generated.DIFFERENTIABLE),
        "empty": per_operation(generated.WHOLE, empties),
        "strided": per_operation(generated.DIFFERENTIABLE, lambda case: len(generated.LAYOUTS)),
    }


def table() -> str:
    """One line for each operation; ``-`` where there is nothing to differentiate, or the arguments come from a rule."""
    columns = counts()
    lines = [f"{'operation':22}" + "".join(f"{kind:>9}" for kind in columns)]
    for name in generated.OPERATIONS:
        lines.append(f"{name:22}" + "".join(f"{column[name] or '-':>9}" for column in columns.values()))
    lines.append(f"{'total':22}" + "".join(f"{column.total():>9}" for column in columns.values()))
    return "\n".join(lines)


if __name__ == "__main__":
    print(f"minigrad {mg.__version__}: {len(generated.OPERATIONS)} operations")
    print(table())
