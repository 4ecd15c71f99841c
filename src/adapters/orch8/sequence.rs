//! Sequences: blocks that become the jobs of one workflow.
//!
//! Each step depends on all before it, so that it gets their outputs; how they must have ended
//! follows from the blocks around them.

use fencepost_domain::{
    backoff::{JitterKind, RetryPolicy, RetryStrategy},
    constraint_key,
    dependency::{Dependency, When},
    error::Error,
    formats::whole_seconds,
    ids::JobId,
    job::{DEFAULT_QUEUE, DEFAULT_TIMEOUT_SECONDS},
    limits,
    plan::Tenant,
    raw_json::RawNode,
    template::TemplateMode,
    workflow::{self, BrokenGraph, Node},
};
use fencepost_engine::{
    enqueue::{
        Extras, NewJob, Start,
        dependencies::{JobWithDependencies, OnConflict},
    },
    jobs::workflows::JobGraph,
};
use fencepost_web::wire::{
    extract::Object,
    openapi::{chars, range},
    templates::Templates,
    validate::Check,
};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use sqlx::types::Json as Stored;
use utoipa::ToSchema;

/// The block that is one task.
const STEP: &str = "step";
/// The block that handles failures of steps.
const TRY_CATCH: &str = "try_catch";
/// Each step gets the outputs of all before it.
pub const MAX_STEPS: usize = limits::MAX_PARENTS;
/// Steps and fallbacks: the last one gets the outputs of all others.
pub const MAX_JOBS: usize = MAX_STEPS + 1;
const DEFAULT_MULTIPLIER: f64 = 2.0;
const DEFAULT_BACKOFF_MS: i64 = 1_000;
const MS_PER_SECOND: i64 = 1_000;

/// A sequence.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SequenceRequest {
    /// A UUID that names it. Default: a new one. Kept of stored sequences only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// Kept and not used: the project is the key's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tenant_id: Option<String>,
    /// Namespace of its name. Default: `default`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    /// Display name; of a stored sequence it is required.
    #[schema(extensions(("bounds" = json!(chars(1, limits::MAX_NAME_CHARS)))))]
    pub name: Option<String>,
    /// Version of its name. Default: 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(extensions(("bounds" = json!(range(1, i32::MAX)))))]
    pub version: Option<i32>,
    /// Must be false.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub deprecated: Option<bool>,
    /// Kept and not used.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub status: Option<String>,
    /// Not kept: the server's time counts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub created_at: Option<String>,
    /// Blocks, in the order in which they run: 1 to 100 steps.
    #[schema(value_type = Vec<BlockRequest>, min_items = 1, max_items = 100)]
    pub blocks: Vec<Object<BlockRequest>>,
}

/// A block. The fields of a `step` are `handler` to `fallback_handler`.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct BlockRequest {
    /// `step` or `try_catch`. For other kinds of blocks use native workflows.
    #[serde(rename = "type")]
    kind: String,
    /// Unique in the sequence.
    #[schema(extensions(("bounds" = json!(chars(1, limits::MAX_NAME_CHARS)))))]
    id: String,
    /// Handler. Required for a step.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(extensions(("bounds" = json!(chars(1, limits::MAX_JOB_TYPE_CHARS)))))]
    handler: Option<String>,
    /// Queue. Default: `default`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(extensions(("bounds" = json!(chars(1, limits::MAX_QUEUE_CHARS)))))]
    queue_name: Option<String>,
    /// A template. Default: an empty object.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Object>)]
    params: Option<Box<RawValue>>,
    /// Default: the retry policy of the queue.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<StepRetry>)]
    retry: Option<Object<StepRetry>>,
    /// Timeout of one attempt, in milliseconds. Default: 30 minutes.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(extensions(("bounds" = json!(range(1, i64::from(limits::MAX_TIMEOUT_SECONDS) * MS_PER_SECOND)))))]
    timeout: Option<i64>,
    /// Runs when the step has failed for good or was cancelled. Later steps run if it succeeds, and
    /// its output takes the place of the step's.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(extensions(("bounds" = json!(chars(1, limits::MAX_JOB_TYPE_CHARS)))))]
    fallback_handler: Option<String>,
    /// Blocks of a `try_catch` whose failure is handled.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Vec<BlockRequest>>, no_recursion)]
    try_block: Option<Vec<Object<BlockRequest>>>,
    /// Blocks that run when the first ones have failed. The sequence continues if they succeed.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Vec<BlockRequest>>, no_recursion)]
    catch_block: Option<Vec<Object<BlockRequest>>>,
    /// Blocks that run after both, in any case.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Vec<BlockRequest>>, no_recursion)]
    finally_block: Option<Vec<Object<BlockRequest>>>,
}

/// Retry policy of a step. Waits are rounded up to seconds.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct StepRetry {
    /// Attempts in all.
    #[schema(extensions(("bounds" = json!(range(1, limits::MAX_MAX_ATTEMPTS)))))]
    max_attempts: i32,
    /// First wait, in milliseconds. Default: 1000.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(extensions(("bounds" = json!(range(0, limits::MAX_RETRY_SECONDS * MS_PER_SECOND)))))]
    initial_backoff: Option<i64>,
    /// Longest wait, in milliseconds, not shorter than the first. Default: six hours.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(extensions(("bounds" = json!(range(0, limits::MAX_RETRY_SECONDS * MS_PER_SECOND)))))]
    max_backoff: Option<i64>,
    /// Factor from each wait to the next. Default: 2.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(extensions(("bounds" = json!(range(1, limits::MAX_RETRY_MULTIPLIER as i64)))))]
    backoff_multiplier: Option<f64>,
}

/// The priority of an instance.
#[derive(Debug, Clone, Copy, Default, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = InstancePriority)]
pub enum Priority {
    /// -10.
    #[serde(alias = "Low")]
    Low,
    /// 0.
    #[default]
    #[serde(alias = "Normal")]
    Normal,
    /// 10.
    #[serde(alias = "High")]
    High,
    /// 20.
    #[serde(alias = "Critical")]
    Critical,
}

impl Priority {
    /// Minus the native priority.
    fn rank(self) -> i16 {
        match self {
            Self::Low => 10,
            Self::Normal => 0,
            Self::High => -10,
            Self::Critical => -20,
        }
    }
}

/// The jobs of a sequence, with the input that its templates name.
pub struct Builder<'a> {
    pub tenant: Tenant,
    pub priority: Priority,
    pub input: &'a RawNode<'a>,
    pub mode: TemplateMode,
    /// Path of the blocks in the request.
    pub path: &'a str,
}

/// The ends of earlier jobs that the next step waits for.
type Earlier = Vec<Dependency<String>>;

/// A job, and the path of its block in the request.
struct Step {
    job: NewJob,
    key: String,
    path: String,
    parents: Earlier,
}

/// Jobs as their blocks are read.
struct Jobs<'a> {
    builder: &'a Builder<'a>,
    templates: Templates<'a>,
    steps: Vec<Step>,
    check: &'a mut Check,
}

impl Builder<'_> {
    /// The jobs of these blocks, each depending on those before it. Broken rules are added to
    /// `check`: nothing of the graph counts then.
    ///
    /// # Errors
    /// [`Error::FieldTooLarge`].
    pub fn build(
        &self,
        blocks: Vec<Object<BlockRequest>>,
        check: &mut Check,
    ) -> Result<JobGraph, Error> {
        let count = blocks.iter().map(|it| it.0.steps()).sum();
        if !(1..=MAX_STEPS).contains(&count) {
            check.refuse(self.path, format!("must have 1 to {MAX_STEPS} steps, has {count}"));
        }
        let templates = Templates::new(self.input, self.tenant);
        let mut jobs = Jobs { builder: self, templates, steps: Vec::new(), check };
        jobs.blocks(blocks, self.path, &mut Vec::new())?;
        Ok(jobs.graph())
    }
}

impl Jobs<'_> {
    fn graph(self) -> JobGraph {
        let Self { builder, steps, check, .. } = self;
        if steps.len() > MAX_JOBS {
            let message = format!("must have at most {MAX_JOBS} steps and fallbacks");
            check.refuse(builder.path, message);
        }
        let nodes = steps.iter().map(|it| Node { key: &it.key, depends_on: &it.parents });
        let parents = workflow::resolve(&nodes.collect::<Vec<_>>()).unwrap_or_else(|broken| {
            // Whatever else is wrong follows from two blocks with one id.
            let twice = broken.into_iter().filter(|it| it.field == "key");
            for BrokenGraph { job, message, .. } in twice {
                let path = job.and_then(|it| Some(steps.get(it)?.path.as_str()));
                check.refuse(&format!("{}id", path.unwrap_or_default()), message);
            }
            Vec::new()
        });
        let job = |it: Step| JobWithDependencies::new(it.job, OnConflict::Reject);
        JobGraph {
            name: None,
            input: None,
            callback_url: None,
            is_held: false,
            jobs: steps.into_iter().map(job).collect(),
            parents,
            batch: None,
            start: None,
        }
    }

    /// Adds these blocks, one after another, to what the next block waits for.
    fn blocks(
        &mut self,
        blocks: Vec<Object<BlockRequest>>,
        path: &str,
        earlier: &mut Earlier,
    ) -> Result<(), Error> {
        for (place, Object(block)) in blocks.into_iter().enumerate() {
            // More are refused.
            if self.steps.len() > MAX_JOBS {
                break;
            }
            let path = format!("{path}[{place}].");
            let mut item = Check::below(path.clone());
            item.name("id", &block.id, limits::MAX_NAME_CHARS);
            block.refuse_fields_of_others(&mut item);
            let added = match block.kind.as_str() {
                STEP => self.step(block, &path, earlier, &mut item),
                TRY_CATCH => self.try_catch(block, &path, earlier, &mut item),
                _ => {
                    let message = "must be step or try_catch: for other kinds of blocks use a \
                        native workflow";
                    item.refuse("type", message);
                    Ok(())
                }
            };
            self.check.absorb(item);
            added?;
        }
        Ok(())
    }

    fn step(
        &mut self,
        mut block: BlockRequest,
        path: &str,
        earlier: &mut Earlier,
        item: &mut Check,
    ) -> Result<(), Error> {
        let (key, fallback) = (block.id.clone(), block.fallback_handler.take());
        let mut job = accept_step(self.builder, block, item)?;
        self.templates.accept(&mut job, self.builder.mode, earlier, "params", item);
        let handled = fallback.map(|handler| {
            item.name("fallback_handler", &handler, limits::MAX_JOB_TYPE_CHARS);
            handling(&job, handler, workflow::fallback_key(&key))
        });
        let (path, parents) = (path.to_owned(), earlier.clone());
        self.steps.push(Step { job, key: key.clone(), path: path.clone(), parents });
        let Some(job) = handled else {
            earlier.push(Dependency::on_success(key));
            return Ok(());
        };
        // Its params are the step's: they may name outputs of earlier steps.
        let mut parents = earlier.clone();
        parents.push(Dependency { parent: key.clone(), when: When::Failed });
        let fallback = workflow::fallback_key(&key);
        self.steps.push(Step { job, key: fallback.clone(), path, parents });
        earlier.push(Dependency { parent: key, when: When::Ended });
        earlier.push(Dependency { parent: fallback, when: When::NotFailed });
        Ok(())
    }

    /// The catching steps run when the last tried one has failed, or was cancelled because of one
    /// before it. If nothing failed they are not needed, which is no failure.
    fn try_catch(
        &mut self,
        block: BlockRequest,
        path: &str,
        earlier: &mut Earlier,
        item: &mut Check,
    ) -> Result<(), Error> {
        let tried = block.try_block.unwrap_or_default();
        let caught = block.catch_block.unwrap_or_default();
        for (name, blocks) in [("try_block", &tried), ("catch_block", &caught)] {
            if blocks.is_empty() {
                item.refuse(name, "must have at least one block");
            }
        }
        if tried.last().is_some_and(|it| it.0.ends_with_finally()) {
            let message = "must not end with a try_catch that ends with a finally_block";
            item.refuse("try_block", message);
        }
        let before = earlier.clone();
        let tried = self.after(tried, &format!("{path}try_block"), before.clone())?;
        let tried = with(tried, |_| When::Ended);
        let mut to_catch = [before.clone(), tried.clone()].concat();
        if let Some(last) = to_catch.get_mut(before.len()..).and_then(<[_]>::last_mut) {
            last.when = When::Failed;
        }
        let caught = self.after(caught, &format!("{path}catch_block"), to_catch)?;
        let to_finish =
            [before.clone(), tried.clone(), with(caught.clone(), |_| When::Ended)].concat();
        let last = block.finally_block.unwrap_or_default();
        let last = self.after(last, &format!("{path}finally_block"), to_finish)?;
        // Without a failure there is nothing to catch.
        let caught = with(caught, |it| if it == When::Succeeded { When::NotFailed } else { it });
        *earlier = [before, tried, caught, last].concat();
        Ok(())
    }

    /// Adds these blocks after `earlier`, and returns what a block after them waits for beside it.
    fn after(
        &mut self,
        blocks: Vec<Object<BlockRequest>>,
        path: &str,
        mut earlier: Earlier,
    ) -> Result<Earlier, Error> {
        let before = earlier.len();
        self.blocks(blocks, path, &mut earlier)?;
        Ok(earlier.split_off(before))
    }
}

fn with(earlier: Earlier, when: impl Fn(When) -> When) -> Earlier {
    earlier.into_iter().map(|it| Dependency { when: when(it.when), ..it }).collect()
}

impl BlockRequest {
    /// Number of steps in the block.
    fn steps(&self) -> usize {
        let inner = [&self.try_block, &self.catch_block, &self.finally_block];
        let inner = inner.into_iter().flatten().flatten().map(|it| it.0.steps()).sum::<usize>();
        inner + usize::from(self.kind != TRY_CATCH)
    }

    /// Returns true if its last step runs whatever failed before.
    fn ends_with_finally(&self) -> bool {
        let caught = self.catch_block.iter().flatten().last();
        self.finally_block.is_some() || caught.is_some_and(|it| it.0.ends_with_finally())
    }

    /// Refuses fields that a block of its kind does not have, and what it lacks.
    fn refuse_fields_of_others(&self, check: &mut Check) {
        let of_step = [
            ("handler", self.handler.is_some()),
            ("queue_name", self.queue_name.is_some()),
            ("params", self.params.is_some()),
            ("retry", self.retry.is_some()),
            ("timeout", self.timeout.is_some()),
            ("fallback_handler", self.fallback_handler.is_some()),
        ];
        let of_try_catch = [
            ("try_block", self.try_block.is_some()),
            ("catch_block", self.catch_block.is_some()),
            ("finally_block", self.finally_block.is_some()),
        ];
        let others = if self.kind == TRY_CATCH { &of_step[..] } else { &of_try_catch[..] };
        for (name, _) in others.iter().filter(|it| it.1) {
            check.refuse(name, format!("is not a field of a {}", self.kind));
        }
        if self.kind == STEP && self.handler.is_none() {
            check.refuse("handler", "must be sent");
        }
    }
}

/// The job that runs when a step has failed for good: the same work with another handler.
fn handling(step: &NewJob, handler: String, key: String) -> NewJob {
    let mut job = NewJob { id: JobId::generate(), job_type: handler, ..step.clone() };
    let extras = job.extras.get_or_insert_default();
    extras.constraint_key = constraint_key::of(&job.job_type, &[], None);
    extras.workflow_key = Some(key);
    job
}

fn accept_step(
    builder: &Builder<'_>,
    step: BlockRequest,
    check: &mut Check,
) -> Result<NewJob, Error> {
    let tenant = builder.tenant;
    check.optional_name("handler", step.handler.as_deref(), limits::MAX_JOB_TYPE_CHARS);
    let handler = step.handler.unwrap_or_default();
    let queue = step.queue_name.unwrap_or_else(|| DEFAULT_QUEUE.to_owned());
    check.name("queue_name", &queue, limits::MAX_QUEUE_CHARS);
    let max_ms = i64::from(limits::MAX_TIMEOUT_SECONDS) * MS_PER_SECOND;
    let timeout_ms = step.timeout.unwrap_or(i64::from(DEFAULT_TIMEOUT_SECONDS) * MS_PER_SECOND);
    check.range("timeout", timeout_ms, 1, max_ms);
    if let Some(params) = &step.params {
        check.size("params", params, tenant.limits.max_payload_bytes())?;
        check.depth("params", params);
        if !params.get().trim_start().starts_with('{') {
            check.refuse("params", "must be an object");
        }
    }
    let payload = step.params.map_or("{}".to_owned(), |it| Box::<str>::from(it).into_string());
    let max_attempts = step.retry.as_ref().map(|it| it.0.max_attempts);
    let extras = Extras {
        constraint_key: constraint_key::of(&handler, &[], None),
        workflow_key: Some(step.id),
        ..Extras::default()
    };
    Ok(NewJob {
        project_id: tenant.project_id,
        id: JobId::generate(),
        queue,
        job_type: handler,
        rank: builder.priority.rank(),
        start: Start::After(0),
        max_attempts,
        timeout_seconds: bounded_seconds(timeout_ms),
        payload,
        retry: step.retry.map(|it| Stored(accept_retry(&it.0, check))),
        tags: None,
        extras: Some(Box::new(extras)),
    })
}

fn accept_retry(sent: &StepRetry, check: &mut Check) -> RetryPolicy {
    const MAX_MS: i64 = limits::MAX_RETRY_SECONDS * MS_PER_SECOND;
    let multiplier = sent.backoff_multiplier.unwrap_or(DEFAULT_MULTIPLIER);
    let initial_ms = sent.initial_backoff.unwrap_or(DEFAULT_BACKOFF_MS);
    let default_ms = i64::from(RetryPolicy::default().max_seconds) * MS_PER_SECOND;
    let longest_ms = sent.max_backoff.unwrap_or(initial_ms.max(default_ms));
    check.range("retry.max_attempts", sent.max_attempts, 1, limits::MAX_MAX_ATTEMPTS);
    check.range("retry.initial_backoff", initial_ms, 0, MAX_MS);
    check.range("retry.max_backoff", longest_ms, initial_ms.min(MAX_MS), MAX_MS);
    check.range("retry.backoff_multiplier", multiplier, 1.0, limits::MAX_RETRY_MULTIPLIER);
    RetryPolicy {
        strategy: RetryStrategy::Exponential,
        initial_seconds: bounded_seconds(initial_ms),
        multiplier,
        max_seconds: bounded_seconds(longest_ms),
        jitter: JitterKind::Additive,
        jitter_seconds: 0,
        non_retryable_types: Vec::new(),
    }
}

/// Values out of bounds were refused before.
fn bounded_seconds<T: TryFrom<i64> + Default>(ms: i64) -> T {
    T::try_from(whole_seconds(ms)).unwrap_or_default()
}
