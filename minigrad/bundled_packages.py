"""``minigrad.nn`` and ``minigrad.optim``: our packages, also where Python finds another one under the name ``nn``.

Any distribution may ship a top-level ``nn``; pip then writes over our files without a word. A script's own ``nn.py``
hides them. So the wheel carries both packages a second time, in ``minigrad/bundled``. What Python finds as ``nn`` is
ours if its files are those of the copy. Then both names are one module, and its classes are the same classes. If not,
the copy is loaded as ``minigrad.nn``, and ``nn`` is left to its owner. In a checkout there is no copy: the packages
stand beside ``minigrad``.
"""

from __future__ import annotations

import filecmp
import importlib
import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).parent


def bundled_package(name: str) -> ModuleType:
    """Our package ``name``, entered in ``sys.modules`` as ``minigrad.name``, its submodules likewise."""
    bundled = HERE / "bundled" / name
    source = bundled if bundled.exists() else HERE.parent / name
    if is_ours(name, source):
        package = importlib.import_module(name)
        parts = {key: module for key, module in sys.modules.items() if key == name or key.startswith(f"{name}.")}
        sys.modules.update({f"minigrad.{key}": module for key, module in parts.items()})
        return package
    alias = f"minigrad.{name}"
    spec = spec_from_file_location(alias, source / "__init__.py", submodule_search_locations=[str(source)])
    assert spec is not None and spec.loader is not None
    sys.modules[alias] = package = module_from_spec(spec)
    spec.loader.exec_module(package)
    return package


def is_ours(name: str, source: Path) -> bool:
    """Whether ``import name`` gives the package whose files lie in ``source``."""
    try:
        spec = find_spec(name)
    except ValueError:  # a module without a spec, made by hand
        return False
    if spec is None or not spec.submodule_search_locations:
        return False
    files = [str(path.relative_to(source)) for path in source.rglob("*") if path.suffix in (".py", ".cu")]
    _, different, absent = filecmp.cmpfiles(source, spec.submodule_search_locations[0], files, shallow=False)
    return not different and not absent
