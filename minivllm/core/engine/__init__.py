"""The engine on the host, which plans the rows and blocks of each step and handles its results.  It uses numpy, not
torch.

    engine ──► planner ──► cache ──► blocks          plan of the next step: StepPlan
       │          └─────► waiting, admission, owners
       ├─────► publisher ──► slots, request, scores   result of a step: StepResult
       └─────► searches ──► beams                     decisions of a search after a step

There is no cycle of imports, not even under ``TYPE_CHECKING``.  A helper below the planner or the engine declares the
attributes that it uses of them in a ``Protocol``.
"""
