"""A producer and a worker that use the published client of Orch8.

    pip install orch8-io-sdk==0.2.0
    ORCH8_URL=http://127.0.0.1:7070/orch8 ORCH8_KEY=fp_live_… python3 orch8_sequence.py

Stores a sequence, starts an instance of it, works its steps, and prints one line per step.
"""
import asyncio
import os
import time

from orch8 import Orch8Client, Orch8Worker


def step(name, params):
    return {"type": "step", "id": name, "handler": name, "params": params}


BLOCKS = [
    {
        "type": "try_catch",
        "id": "charging",
        "try_block": [step("charge", {"amount": "{{context.data.amount}}"})],
        "catch_block": [step("refund", {})],
    },
    step("ship", {"to": "{{context.data.name}}"}),
]


async def charge(task):
    print("charge", task.params["amount"], flush=True)
    raise ValueError("no funds")


async def refund(task):
    print("refund", flush=True)
    return {}


async def ship(task):
    print("ship", task.params["to"], flush=True)
    return {"sent": True}


async def main():
    headers = {"X-Api-Key": os.environ["ORCH8_KEY"]}
    async with Orch8Client(os.environ["ORCH8_URL"], tenant_id="acme", headers=headers) as client:
        sequence = await client.create_sequence(
            {"tenant_id": "acme", "namespace": "shop", "name": "order", "version": int(time.time()), "blocks": BLOCKS}
        )
        data = {"name": "Ada", "amount": 7}
        instance = await client.create_instance(
            {"sequence_id": sequence.id, "tenant_id": "acme", "namespace": "shop", "context": {"data": data}}
        )
        handlers = {"charge": charge, "refund": refund, "ship": ship}
        worker = Orch8Worker(client=client, worker_id="python", handlers=handlers, poll_interval=0.2)
        working = asyncio.create_task(worker.start())
        while instance.state == "running":
            await asyncio.sleep(0.2)
            instance = await client.get_instance(instance.id)
        print(instance.state, instance.sequence_id == sequence.id, flush=True)
        await worker.stop()
        working.cancel()


asyncio.run(main())
