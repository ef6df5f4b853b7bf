"""Functions of a user's own, named on the command line as `package.module:function`."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.machinery import PathFinder
from modulefinder import ModuleFinder
from pathlib import Path
from typing import Any

import torch
from torch import nn

from harness.errors import HarnessError, first_line
from harness.runtime.models.torchvision_import import allow_torchvision
from harness.runtime.ranks.failures import users_line

_PACKAGE = 5  # modulefinder's kind of a package
_EXAMPLE = "write it like package.module:factory"
# Settings of torch that hold for all that follows: how to read and to set them.
_SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "default device": (torch.get_default_device, torch.set_default_device),
    "gradient mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "number of threads": (torch.get_num_threads, torch.set_num_threads),
}


@dataclass(frozen=True)
class UserFunction:
    """A function of a user that makes a model or a data set.

    Attributes:
        flag: that names it, for errors.
        error: raised where the function is missing, fails to be imported, or misbehaves.
    """

    name: str
    flag: str
    error: type[HarnessError]

    def call(self, offered: Mapping[str, Any]) -> Any:
        """Call the function with those of the offered arguments that it accepts."""
        function = self.load()
        signature = inspect.signature(function)
        given = {key: value for key, value in offered.items() if key in signature.parameters}
        try:
            signature.bind(**given)
        except TypeError as error:
            raise self._error(f"{error}; give its arguments defaults") from error
        with self._contained():
            return function(**given)

    def defaults(self) -> dict[str, Any]:
        """The defaults of the function's arguments, by name; None for those without."""
        parameters = inspect.signature(self.load()).parameters
        return {
            name: None if parameter.default is parameter.empty else parameter.default
            for name, parameter in parameters.items()
        }

    def load(self) -> Callable[..., Any]:
        with self._contained():
            module_name, attribute = self.parts()
            with self._imported(module_name):
                module = importlib.import_module(module_name)
            found = getattr(module, attribute, None)
        if not callable(found):
            raise self._error(
                f"{module.__file__} has no callable {attribute!r}: name a function that it defines"
            )
        if isinstance(found, nn.Module):
            raise self._error(
                f"is a model, not a function that makes one: add `def make(): return {attribute}` "
                "without its arguments, because every rank and run builds its own",
                " ",
            )
        return found  # type: ignore[no-any-return]

    def check(self) -> None:
        """Import the function; an error of its code is raised in one line."""
        try:
            self.load()
        except HarnessError:
            raise
        except Exception as error:
            place = users_line(error)
            where = f" ({place})" if place else ""
            raise self._error(f"{type(error).__name__}: {first_line(error)}{where}") from error

    def find(self) -> None:
        """Refuse a module that is missing, of which only the packages around it are imported."""
        module_name, _ = self.parts()
        with self._contained(), self._imported(module_name):
            try:
                found = importlib.util.find_spec(module_name)
            except ModuleNotFoundError:
                raise
            except Exception:
                return  # the run itself reports it
            if found is None:
                raise ModuleNotFoundError(f"No module named {module_name!r}", name=module_name)

    def _error(self, problem: str, separator: str = ": ") -> HarnessError:
        return self.error(f"{self.flag} {self.name!r}{separator}{problem}")

    def parts(self) -> tuple[str, str]:
        """The names of the module and of its function, of which nothing is imported.

        Raises:
            HarnessError: the name has another form.
        """
        module_name, _, attribute = self.name.partition(":")
        if not module_name or not attribute:
            raise self._error(f"does not name a factory: {_EXAMPLE}", " ")
        if "/" in module_name or module_name.endswith(".py"):
            dotted = module_name.removesuffix(".py").strip("./").replace("/", ".")
            raise self._error(
                f"names a file: write {dotted}:{attribute}, and start in the directory from which "
                "it can be imported",
                " ",
            )
        return module_name, attribute

    @contextlib.contextmanager
    def _imported(self, module_name: str) -> Iterator[None]:
        """Import from where the program has been started; a missing module is an error."""
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        allow_torchvision()
        try:
            yield
        except ModuleNotFoundError as error:
            remedy = f"start in the directory that holds {module_name}, or set PYTHONPATH"
            if error.name is not None and not f"{module_name}.".startswith(f"{error.name}."):
                remedy = f"{module_name} needs it: install it into the environment"
            raise self._error(f"{error}; {remedy}, on every node") from error

    @contextlib.contextmanager
    def _contained(self) -> Iterator[None]:
        """Run code of a user that must leave the process and torch's settings as they are; a
        setting by which other code would be measured than the run says is restored."""
        before = {setting: read() for setting, (read, _) in _SETTINGS.items()}
        try:
            yield
        except SystemExit as error:
            raise self._error(
                f"its code exits with status {error.code}: put what parses flags or trains below "
                "`if __name__ == '__main__':`"
            ) from error
        for setting, (read, write) in _SETTINGS.items():
            now = read()
            if now != before[setting]:
                write(before[setting])
                raise self._error(
                    f"its code changes torch's {setting} from {before[setting]} to {now} for all "
                    "that follows: leave that out, or set it back"
                )


class _OwnModules(ModuleFinder):
    """Also finds modules of packages without `__init__.py`, at which ModuleFinder fails."""

    def find_module(self, name: str, path: Any, parent: Any = None) -> Any:
        spec = PathFinder.find_spec(name, self.path if path is None else path)
        if spec and spec.origin is None and spec.submodule_search_locations is not None:
            return None, [*spec.submodule_search_locations], ("", "", _PACKAGE)
        return super().find_module(name, path, parent)

    def load_package(self, fqname: str, pathname: Any) -> Any:
        if isinstance(pathname, str):
            return super().load_package(fqname, pathname)
        package: Any = self.add_module(fqname)
        package.__path__ = pathname
        return package


def _is_installed(place: str) -> bool:
    """Whether a place holds Python's own modules or installed ones, also by `pip --target`."""
    real, library = Path(place).resolve(), Path(sysconfig.get_path("stdlib")).resolve()
    is_library = real.is_relative_to(library) or real.name in ("site-packages", "dist-packages")
    return is_library or any(real.glob("*.dist-info"))


def code_digest(*names: str) -> str:
    """Hash the modules of users' functions and all that they import from the working directory, the
    program's and PYTHONPATH's, of which nothing is imported here; empty if there are none."""
    places = (os.getcwd(), *filter(None, sys.path))
    finder = _OwnModules([p for p in places if not _is_installed(p)], excludes=["harness"])
    for name in (name for name in names if ":" in name):
        with contextlib.suppress(Exception):  # importing it reports more
            finder.import_hook(name.partition(":")[0])
    modules: dict[str, Any] = finder.modules
    files = {key: module.__file__ for key, module in modules.items()}
    digest = hashlib.sha256()
    for key, file in sorted((key, file) for key, file in files.items() if file):
        digest.update(f"{key}\n".encode() + Path(file).read_bytes())
    return digest.hexdigest()[:12] if files else ""


def source_of(name: str) -> str:
    """The text of a function's file, which is not imported; empty if it is not found."""
    parts = name.partition(":")[0].split(".")
    for directory in (os.getcwd(), *sys.path):
        module = Path(directory, *parts)
        for file in (module.with_suffix(".py"), module / "__init__.py"):
            with contextlib.suppress(OSError, ValueError):
                return file.read_text(encoding="utf-8")
    return ""
