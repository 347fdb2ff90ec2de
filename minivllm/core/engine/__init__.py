"""The host's room: which rows run in a step, where their blocks lie, what their results mean.  numpy, no torch.

engine ──► planner ──► cache ──► blocks          what to compute next: StepPlan
   │          └─────► waiting, admission, owners
   ├─────► publisher ──► slots, request, scores   what came back: StepResult
   └─────► searches ──► beams                     what a search decides after a step

No modules import in a circle, not even under ``TYPE_CHECKING``: a helper below the planner or the engine declares the
attributes of it that it uses in a ``Protocol``.
"""
