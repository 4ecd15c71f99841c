# `make help` lists what can be done here.
.DEFAULT_GOAL := help
.PHONY: help setup setup-test run test fmt lint deny doc unit soak fuzz bench openapi clients pictures console-pictures e2e configuration dashboards sqlx clean-test

CARGO ?= cargo

help: ## List these targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | sort | while IFS='	' read -r name text; do printf '  %-12s %s\n' "$$name" "$$text"; done

setup: ## Install what is missing on this machine (PostgreSQL, Redis)
	@sh scripts/setup.sh

run: setup ## Set up, build, and run everything on this machine: `fencepost dev`
	$(CARGO) run --locked --release -- dev

setup-test: ## Install what the tests need beside (Go, Node, Java, pip, jq, Prometheus, HAProxy, Chromium)
	@sh scripts/setup.sh test

test: setup-test fmt lint doc unit e2e ## Set up and run every check and every test

fmt: ## Check the formatting
	$(CARGO) fmt --check

lint: deny ## Check with clippy, and the crates with cargo-deny; a warning is an error
	$(CARGO) clippy --locked --all-targets -- -D warnings

deny: ## Check where crates come from, their licences, and what is known of them
	@sh scripts/deny.sh

doc: ## Build the reference; a warning is an error
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --locked --no-deps --document-private-items --quiet

unit: ## Run all tests, against a PostgreSQL and a Redis that they start themselves
	$(CARGO) test --locked
	@$(MAKE) --no-print-directory clean-test

e2e: setup-test ## Use the console in a real browser, against a server under load
	$(CARGO) build --locked
	@sh scripts/e2e.sh

soak: setup-test ## Let nodes that are killed at random fire schedules, 20 times a minute long
	FENCEPOST_DUEL_SECONDS=60 FENCEPOST_DUEL_ROUNDS=20 \
		$(CARGO) test --locked --test it -- --nocapture nodes_that_are_killed_at_random

fuzz: setup ## Send 20,000 requests made from the OpenAPI file, good and bad, to a server of its own
	@sh scripts/fuzz.sh

bench: ## Measure a server of its own over HTTP
	$(CARGO) run --locked --release -- bench

openapi: ## Write the documents in openapi/ anew from the handlers
	$(CARGO) run --locked --quiet -- openapi > openapi/openapi.json.part
	mv openapi/openapi.json.part openapi/openapi.json
	$(CARGO) run --locked --quiet -- openapi --older > openapi/openapi-3.0.json.part
	mv openapi/openapi-3.0.json.part openapi/openapi-3.0.json
	$(CARGO) run --locked --quiet -- openapi --postman > openapi/postman.json.part
	mv openapi/postman.json.part openapi/postman.json
	for adapter in mobius orch8 ojs workflow-graph; do \
		$(CARGO) run --locked --quiet -- openapi --adapter $$adapter > openapi/$$adapter.json.part && \
		mv openapi/$$adapter.json.part openapi/$$adapter.json || exit 1; \
	done

clients: setup-test ## Make clients with five generators, compile them, and let each work a job
	@bash scripts/clients.sh

pictures: setup-test ## Draw the dashboards over a server under load, for docs/pictures/
	@bash scripts/pictures.sh

console-pictures: setup-test ## Draw the console over a server with work in it, for docs/pictures/
	$(CARGO) build --locked
	@sh scripts/e2e.sh pictures

configuration: ## Write docs/configuration.md anew from the flags
	$(CARGO) run --locked --quiet -- configuration > docs/configuration.md.part
	mv docs/configuration.md.part docs/configuration.md

dashboards: ## Write the Grafana dashboards anew
	python3 scripts/dashboards.py

sqlx: setup ## Check every statement against the migrations, and write .sqlx/ anew
	@sh scripts/sqlx.sh

clean-test: ## Throw the tests' PostgreSQL away, unless a run is using it
	@for place in /var/tmp/fencepost-test-*; do \
		[ ! -e "$$place/lock" ] || flock --nonblock "$$place/lock" rm -rf "$$place/postgres" || true; \
	done
