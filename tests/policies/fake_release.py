"""A tiny release that speaks the protocol of `policies.installed`: first come, first served, whole prompts, no end of memory."""

from __future__ import annotations

import json
import sys


class Engine:
    def __init__(self, settings):
        self.settings = settings
        self.waiting, self.running, self.left, self.prompt, self.cold = [], [], {}, {}, {}
        self.planned = []

    def step(self, told):
        emitted, ended = [], []
        if told["done"] is not None:
            self.planned.pop(0)
            for id_, tokens in told["done"]:
                if id_ in self.left:
                    self.left[id_] -= tokens
                    emitted.append([id_, tokens])
                    if self.left[id_] <= 0:
                        ended.append(id_)
                        self.drop(id_)
        for each in told["add"]:
            self.waiting.append(each["id"])
            self.left[each["id"]], self.prompt[each["id"]] = each["output"], each["prompt"]
            self.cold[each["id"]] = each["grammar"]
        for id_ in told["abort"]:
            self.drop(id_)
        for id_ in told["ready"]:
            self.cold[id_] = False
        run, found = [[id_, 1, 0] for id_ in self.running], []
        for id_ in [id_ for id_ in self.waiting if not self.cold[id_]]:
            if len(self.running) < self.settings["max_num_seqs"]:
                self.waiting.remove(id_)
                self.running.append(id_)
                run.append([id_, self.prompt[id_], 0])
                found.append([id_, 0])
        plan = {
            "run": run,
            "found": found,
            "preempted": [],
            "held": len(self.running),
            "evicted": 0,
            "skips_drafts": False,
        }
        self.planned.append(plan)
        return {"emitted": emitted, "ended": ended, "plan": plan, "has_requests": bool(self.left)}

    def drop(self, id_):
        for where in (self.waiting, self.running):
            if id_ in where:
                where.remove(id_)
        self.left.pop(id_, None)


def main():
    engines = {}
    for line in sys.stdin:
        told = json.loads(line)
        if "start" in told:
            answer = {"release": "Tiny 1.0"}
            if told["start"]["options"].get("unheard_of"):
                answer = {"error": "Tiny 1.0: SchedulerConfig has no unheard_of; leave it out"}
            if told["start"]["options"].get("falls_silent"):
                return
            engines[told["engine"]] = Engine(told["start"])
        elif "drop" in told:
            answer = {"dropped": bool(engines.pop(told["engine"], None))}
        else:
            answer = engines[told["engine"]].step(told)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
