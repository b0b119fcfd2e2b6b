"""From recipe files and the command line to a `Recipe`, in four stages.

1. `reader`: YAML as plain data; tags, repeated keys and endless aliases are refused.
2. `compose`: files and overrides are laid over each other in one tree, with all defaults. Here, and only here, a value
   is converted to its option's type, which states its range, and a name is looked up among the registered parts.
3. `Composer.finish`: required options that are missing are reported, `references` have their values, and `build` makes
   sections and parts of the tree.
4. `rlkit.recipe.check`: relations between options.

`rlkit.commands` drives them for the command line, and `rlkit.api` for Python. The types come from
`rlkit.recipe.schema`, messages from `suggest`. Mistakes are collected, and reported at once. Nothing here trains, reads
data or imports what a recipe names.

An option on its way, `--advantage.eps=1e-4`:

    split           the word is an override, with a key and a text
    add             of the whole tree
    _node           the section or part that has the key, with its defaults
    _set_option     one option of it; a mistake becomes a problem, and composing continues
    _merge          by the option's type: a part here, a number in it
    _merge_part     the class, which the recipe has named before
    _convert        the text as a value, unless it refers to another option
    load            the text as YAML
    convert         a number in the option's range
    missing         in `finish`: what no recipe has set
    map_texts       references to options, then to the environment
    build           `GRPO(eps=1e-4)`
"""
