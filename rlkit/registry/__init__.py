"""Plugins and the parts that they register.

What belongs here: finding and loading plugins (`registry`), checks of what they define (`checks`), rlkit's own parts
(`builtin`) and those of packages in its wheel (`shelf`), and the boundary through which a part is called and blamed by
name. What does not: the hooks (`rlkit.hooks`), the interfaces that parts subclass (`rlkit.interfaces`), and the parts
themselves.
"""

from rlkit.registry.registry import Part, RecipeFile, Registry, calling, close_parts, load_plugins, require

__all__ = ["Part", "RecipeFile", "Registry", "calling", "close_parts", "load_plugins", "require"]
