# `make help` lists the targets.
.DEFAULT_GOAL := help
.PHONY: help setup setup-test run test nightly slowest fmt lint deny audit advisories doc unit soak fuzz deadlocks model interleavings chaos chaos-long chaos-patroni chaos-build mutants bench isolation abuse image release openapi clients pictures console-pictures e2e vitals configuration dashboards sqlx clean-test

CARGO ?= cargo

help: ## List these targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | sort | while IFS='	' read -r name text; do printf '  %-12s %s\n' "$$name" "$$text"; done

setup: ## Install missing dependencies (PostgreSQL, Redis)
	@sh scripts/setup.sh

run: setup ## Set up, build without optimisation, and run everything here with `fencepost dev`
	$(CARGO) run --locked --profile quick -- dev

setup-test: ## Install dependencies of the tests (Go, Node, Java, pip, jq, Prometheus, HAProxy, Chromium)
	@sh scripts/setup.sh test

test: setup ## Set up, and run all checks and tests of a change; prints the time of each step
	@python3 scripts/checks.py day

nightly: setup ## Run what takes longer than a change can wait: FROM a step, or all that has not passed
	@python3 scripts/checks.py night $(FROM)

slowest: ## Print the slowest steps and tests of the last `make test`
	@python3 scripts/checks.py slowest

fmt: ## Check the formatting
	$(CARGO) fmt --all --check

lint: deny ## Run clippy, cargo-deny and the linters of the OpenAPI documents; warnings are errors
	$(CARGO) clippy --locked --workspace --all-targets -- -D warnings
	$(CARGO) clippy --locked -p fencepost -- -D warnings
	@sh scripts/lint_openapi.sh

deny: ## Check sources, licences and security advisories of the crates
	@sh scripts/deny.sh

audit: ## Check the crates with advisories of at most seven days ago, from github.com
	@sh scripts/deny.sh audit

advisories: ## Replace the advisories in ops/advisories by the newest ones
	@sh scripts/deny.sh vendor

doc: ## Build the API reference of the crate; warnings are errors
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --locked --workspace --no-deps --document-private-items --quiet

unit: ## Run all tests; they start their own PostgreSQL and Redis
	$(CARGO) test --locked --workspace
	@$(MAKE) --no-print-directory clean-test

e2e: setup-test ## Test the console in a real browser, on a server under load
	$(CARGO) build --locked --workspace
	@sh scripts/e2e.sh

soak: setup-test ## Fire schedules on nodes that are killed at random: 20 rounds of one minute
	FENCEPOST_DUEL_SECONDS=60 FENCEPOST_DUEL_ROUNDS=20 \
		$(CARGO) test --locked --test it -- --nocapture nodes_that_are_killed_at_random

fuzz: setup ## Send 20,000 valid and invalid requests, generated from the OpenAPI file, to a private server
	@sh scripts/fuzz.sh

deadlocks: setup-test ## Try for SECONDS (600) to make operations on the same rows deadlock
	FENCEPOST_DEADLOCK_SECONDS=$(or $(SECONDS),600) \
		$(CARGO) test --locked --test it -- --nocapture never_deadlock

model: ## Check the lease protocol and the order of groups in every order of events, at full size (about 12 minutes)
	FENCEPOST_MODEL_FULL=1 $(CARGO) test --locked -p fencepost-proof -- --nocapture --test-threads 1

interleavings: ## Run the server's synchronisation in 50,000 random orders of each test
	FENCEPOST_ORDERS=50000 $(CARGO) test --locked -p fencepost-interleavings -- --nocapture

CHAOS_PROFILE = dev
CHAOS = ./target/$(CHAOS_PROFILE:dev=debug)/fencepost-chaos
CHAOS_RUN = $(CHAOS) run $(if $(PREVIOUS),--previous $(PREVIOUS)) $(if $(LOAD),--load $(LOAD))

chaos: chaos-build ## Run clients and faults: SEED and SECONDS (120), REPEAT times (1); without SEED five runs, two of them new; PREVIOUS, the server of an earlier release; LOAD percent of the jobs; CHAOS_PROFILE=chaos, the build of long runs
	@if [ -n "$(SEED)" ]; then \
		$(CHAOS_RUN) --seed $(SEED) --seconds $(or $(SECONDS),120) --repeat $(or $(REPEAT),1); \
	else \
		for seed in 1 2 3; do $(CHAOS_RUN) --seed $$seed --seconds $(or $(SECONDS),60) || exit 1; done; \
		for run in 1 2; do $(CHAOS_RUN) --seconds $(or $(SECONDS),60) || exit 1; done; \
	fi

chaos-long chaos-patroni: CHAOS_PROFILE = chaos
chaos-long: chaos-build ## The same for HOURS (1) in pieces of 20 minutes, LOAD percent (100) of the jobs; results go to docs/proof.md
	@end=$$(( $$(date +%s) + $(or $(HOURS),1) * 3600 )); \
	while [ $$(date +%s) -lt $$end ]; do \
		$(CHAOS_RUN) --seconds 1200 --results docs/proof.jsonl || failed=1; \
		$(CHAOS) page --results docs/proof.jsonl --page docs/proof.md || exit 1; \
		[ -z "$$failed" ] || exit 1; \
	done

chaos-patroni: chaos-build ## The same for SECONDS (600) while Patroni leads PostgreSQL, with etcd and HAProxy
	@sh scripts/setup.sh patroni
	$(CHAOS_RUN) --patroni --seconds $(or $(SECONDS),600) $(if $(SEED),--seed $(SEED))

mutants: chaos-build ## Run nodes with each bug of chaos/bugs.toml until it is caught: ONLY=1,2 or all
	@sh scripts/planted.sh $(CHAOS)
	$(CHAOS) mutants --program target/planted/fencepost $(if $(ONLY),--only $(ONLY)) --results docs/proof.jsonl
	$(CHAOS) page --results docs/proof.jsonl --page docs/proof.md

chaos-build:
	@sh scripts/setup.sh chaos
	$(CARGO) build --locked --profile $(CHAOS_PROFILE) -p fencepost -p fencepost-chaos

image: ## Build an image with the server as an OCI archive, without Docker, in target/image/
	$(CARGO) build --locked --release -p fencepost
	@python3 scripts/image.py build
	@python3 scripts/image.py check

release: image ## Build what a release publishes into target/publish/: package, image, parts, checksums
	@sh scripts/deb.sh
	@python3 scripts/release.py

bench: ## Benchmark a private server over HTTP
	$(CARGO) build --locked --release -p fencepost -p fencepost-bench
	./target/release/fencepost-bench

isolation: ## Measure what one tenant notices of attacks by another, SECONDS (10) for each
	$(CARGO) build --locked --release -p fencepost -p fencepost-bench
	./target/release/fencepost-bench --isolation --seconds $(or $(SECONDS),10)

abuse: ## Measure what one tenant notices of a stranger with a free account, SECONDS (10) for each
	$(CARGO) build --locked --release -p fencepost -p fencepost-bench
	./target/release/fencepost-bench --abuse --seconds $(or $(SECONDS),10)

openapi: ## Regenerate the documents in openapi/ from the handlers
	$(CARGO) run --locked --quiet -- openapi --dir openapi

clients: setup-test ## Generate clients with six generators, compile them, and run a job with each
	@sh scripts/setup.sh clients
	@bash scripts/clients.sh

pictures: setup-test ## Draw the dashboards of a server under load, for docs/pictures/
	@bash scripts/pictures.sh

console-pictures: setup-test ## Take screenshots of the console with sample jobs, for docs/pictures/
	$(CARGO) build --locked
	@sh scripts/e2e.sh pictures

vitals: setup-test ## Measure how soon pages of the console are there, and how much they move, with a million jobs
	$(CARGO) build --locked --release -p fencepost
	@FENCEPOST_BINARY=$(CURDIR)/target/release/fencepost sh scripts/e2e.sh vitals

configuration: ## Regenerate docs/configuration.md from the flags
	$(CARGO) run --locked --quiet -- configuration > docs/configuration.md.part
	mv docs/configuration.md.part docs/configuration.md

dashboards: ## Regenerate the Grafana dashboards
	python3 scripts/dashboards.py

sqlx: setup ## Check every statement against the migrations, and regenerate .sqlx/
	@sh scripts/sqlx.sh

clean-test: ## Delete the tests' PostgreSQL, unless a test run is using it
	@for place in /var/tmp/fencepost-test-* /dev/shm/fencepost-test-*; do \
		[ ! -e "$$place/lock" ] || flock --nonblock "$$place/lock" rm -rf "$$place"/postgres "$$place"/standby-* || true; \
	done
