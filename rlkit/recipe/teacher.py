"""Checks of the teacher."""

from __future__ import annotations

from collections.abc import Iterator

from rlkit.recipe.recipe import Recipe


def check_teacher(recipe: Recipe) -> Iterator[str]:
    """Yield the problems of the section `teacher`."""
    teacher, temperature = recipe.teacher, recipe.rollout.sampling.temperature
    name, reads_teacher = type(recipe.loss).__name__, bool(recipe.loss.forward.teacher_top)
    if teacher is None:
        if reads_teacher:
            yield f"loss {name} reads a teacher, but the recipe has no `teacher:`; add one with the path of a model"
        return
    if reads_teacher and teacher.coef != 1:
        yield f"teacher.coef is {teacher.coef:g}, the weight of an advantage, but loss {name} reads none; remove it"
    if teacher.context is None and not teacher.paths():
        yield (
            "teacher.path is null: the policy itself, which without teacher.context has nothing to teach; set "
            'teacher.context, such as "{prompt}\\nThe answer is {answer}.", or the path of another model'
        )
    if teacher.urls is None:
        return
    if not teacher.urls:
        yield "teacher.urls names no server; add one, or set it to null to load the teacher here"
    for url in teacher.urls:
        if not url.startswith(("http://", "https://")):
            yield f"teacher.urls has {url!r}, expected http://… or https://…"
    if teacher.path is None:
        yield "teacher.urls are servers of a teacher, but teacher.path does not name their model; set it"
    if temperature != 1:
        yield (
            f"rollout.sampling.temperature is {temperature}, but the servers at teacher.urls return log-probs of "
            "temperature 1; set it to 1, or teacher.urls to null"
        )
