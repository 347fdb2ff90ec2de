"""The engine on the host: the rows of each step, their blocks, and the handling of their results.  numpy, no torch.

engine ──► planner ──► cache ──► blocks          plan of the next step: StepPlan
   │          └─────► waiting, admission, owners
   ├─────► publisher ──► slots, request, scores   result of a step: StepResult
   └─────► searches ──► beams                     decisions of a search after a step

No modules import in a circle, not even under ``TYPE_CHECKING``: a helper below the planner or the engine declares the
attributes of it that it uses in a ``Protocol``.
"""
