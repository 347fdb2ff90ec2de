"""The host's room: which rows run in a step, where their blocks lie, what their results mean.  numpy, no torch.

engine ──► planner ──► cache ──► blocks          what to compute next: StepPlan
   │          └─────► waiting, admission, owners
   └─────► publisher ──► slots, request, scores   what came back: StepResult
"""
