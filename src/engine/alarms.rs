//! Alarms: a loop looks at each project in which something may be found, a page after the other,
//! and begins and ends incidents. An incident, its event and its mails are stored in one
//! transaction, so any number of nodes notify of it once.

mod causes;

use std::{
    collections::{HashMap, VecDeque},
    sync::{Mutex, PoisonError},
};

use fencepost_domain::{
    alarm::{Changes, Details, Finding, MAX_OPEN_INCIDENTS, Name, Open, Rule, judge},
    ids::{EndpointId, IncidentId, JobId, KeyId, ProjectId},
    outbound::shown_host,
    webhook::{ALARM_RESOLVED, ALARM_TRIGGERED},
};
use fencepost_signals::wakeups::BackgroundTask;
use fencepost_store::{
    outbound::{
        incidents::{self, NewIncident, OpenIncident},
        outbound_events::{self, About, NewEvent},
    },
    sweep::{
        self,
        alarmed_projects::{self, MAX_ROUND_PROJECTS},
        alarms::{self as looks, Found, MAX_PAGE_PROJECTS},
        set_aside::Work,
    },
};
use sqlx::PgConnection;
use uuid::Uuid;

use self::causes::Grouped;
use super::{
    Engine,
    isolate::{self, Sweep},
};

/// Longest time of one statement of a look, in milliseconds.
const LOOK_TIMEOUT_MS: u32 = 5_000;
/// The SQLSTATE of a statement that took longer.
const QUERY_CANCELED: &str = "57014";

/// The alarms of one node.
pub struct Alarms {
    round: Mutex<Round>,
    sends_mail: bool,
}

/// Projects in which something may be found.
#[derive(Default)]
struct Round {
    waiting: VecDeque<ProjectId>,
    /// The last project of this round, if there may be more after it.
    last: Option<ProjectId>,
}

impl Round {
    fn of(projects: Vec<ProjectId>) -> Self {
        let is_cut = projects.len() as i64 == MAX_ROUND_PROJECTS;
        Self { last: projects.last().copied().filter(|_| is_cut), waiting: projects.into() }
    }

    /// A page that fails is not looked at forever: its projects come again in the next round.
    fn next_page(&mut self) -> Vec<ProjectId> {
        let size = self.waiting.len().min(MAX_PAGE_PROJECTS);
        self.waiting.drain(..size).collect()
    }

    fn has_more(&self) -> bool {
        !self.waiting.is_empty() || self.last.is_some()
    }
}

impl Alarms {
    #[must_use]
    pub fn new(sends_mail: bool) -> Self {
        Self { round: Mutex::default(), sends_mail }
    }

    /// Looks at the next page of projects. Returns whether there are more.
    ///
    /// # Errors
    /// When the database does not answer.
    pub async fn pass(&self, engine: &Engine) -> sqlx::Result<bool> {
        let mut conn = engine.pools.background.acquire().await?;
        let ended = self.with_round(|it| it.waiting.is_empty().then_some(it.last));
        if let Some(last) = ended {
            let found = alarmed_projects::find(&mut conn, last.unwrap_or(ProjectId(0))).await?;
            self.with_round(|it| *it = Round::of(found));
        }
        let (page, has_more) = self.with_round(|it| (it.next_page(), it.has_more()));
        let projects = looks::page(&mut conn, &page).await?;
        let notified = isolate::process(engine, &mut conn, self, &projects).await?;
        if notified.contains(&true) {
            engine.notifier.wake.ask(BackgroundTask::Events);
            engine.notifier.wake.ask(BackgroundTask::Mails);
        }
        Ok(has_more)
    }

    fn with_round<T>(&self, body: impl FnOnce(&mut Round) -> T) -> T {
        body(&mut self.round.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Writes what has changed of one project. Returns whether an endpoint or a member is notified.
    async fn write(
        &self,
        tx: &mut PgConnection,
        project_id: ProjectId,
        (changes, found): (Changes, &[Grouped]),
        open: &[OpenIncident],
    ) -> sqlx::Result<bool> {
        let max = usize::try_from(MAX_OPEN_INCIDENTS).unwrap_or(usize::MAX);
        let room = max.saturating_sub(open.len());
        // By their ids: another node may have ended one and begun the next meanwhile.
        let ids = |names: &[Name]| {
            let named = open.iter().filter(|it| names.contains(&name_of_open(it)));
            named.map(|it| it.id).collect::<Vec<_>>()
        };
        let at_once = changes.trigger_new.iter().map(|it| (it, true));
        let later = changes.begin.iter().map(|it| (it, false));
        let new: Vec<_> = at_once
            .chain(later)
            .take(room)
            .filter_map(|(name, is_triggered)| {
                let found = found.iter().find(|it| name_of(&it.found) == *name)?;
                Some(new_incident(name, found, is_triggered))
            })
            .collect();
        let mut triggered = incidents::begin(tx, project_id, &new).await?;
        // More may have become known of a cause since its incident began.
        let is_news = |it: &&OpenIncident| {
            let name = name_of_open(it);
            changes.trigger.contains(&name) || changes.touch.contains(&name)
        };
        let news = open.iter().filter(is_news).filter_map(|open| {
            let of_open = |it: &&Grouped| name_of(&it.found) == name_of_open(open);
            let has_news = |it: &&Grouped| !it.queues.is_empty() || !it.lost_by.is_empty();
            let found = found.iter().find(of_open).filter(has_news)?;
            Some((open.id, details(found)))
        });
        incidents::describe(tx, project_id, &news.collect::<Vec<_>>()).await?;
        triggered.extend(incidents::trigger(tx, project_id, &ids(&changes.trigger)).await?);
        incidents::touch(tx, project_id, &ids(&changes.touch)).await?;
        incidents::forget(tx, project_id, &ids(&changes.forget)).await?;
        let ended = open.iter().filter(|it| changes.resolve.contains(&name_of_open(it)));
        let ended: Vec<_> = ended.map(|it| (it.id, state(it).ends_after_seconds)).collect();
        let resolved = incidents::resolve(tx, project_id, &ended).await?;
        let is_notified = self.notify(tx, project_id, &triggered, false).await?;
        Ok(self.notify(tx, project_id, &resolved, true).await? || is_notified)
    }

    async fn notify(
        &self,
        tx: &mut PgConnection,
        project_id: ProjectId,
        changed: &[Uuid],
        is_resolved: bool,
    ) -> sqlx::Result<bool> {
        let incidents = incidents::to_notify(tx, project_id, changed).await?;
        if incidents.is_empty() {
            return Ok(false);
        }
        let kind = if is_resolved { ALARM_RESOLVED } else { ALARM_TRIGGERED };
        let about: Vec<_> = incidents.iter().map(|id| About::Incident(IncidentId(*id))).collect();
        let event = NewEvent { kind, about: &about, url: None, hop: None };
        outbound_events::store(tx, project_id, event).await?;
        if self.sends_mail {
            incidents::mail(tx, project_id, &incidents, is_resolved).await?;
        }
        Ok(true)
    }
}

impl Sweep for Alarms {
    type Item = ProjectId;
    type Done = bool;
    const WORK: Work = Work::Alarms;

    fn name(item: &ProjectId) -> (ProjectId, String) {
        (*item, "all".to_owned())
    }

    async fn process(&self, tx: &mut PgConnection, projects: &[ProjectId]) -> sqlx::Result<bool> {
        sweep::limit_statements(tx, LOOK_TIMEOUT_MS).await?;
        self.look_at(tx, projects).await
    }
}

impl Alarms {
    async fn look_at(&self, tx: &mut PgConnection, projects: &[ProjectId]) -> sqlx::Result<bool> {
        let ids: Vec<_> = projects.iter().map(|it| it.0).collect();
        // Before the look: what another node begins and ends meanwhile is not touched.
        let mut open: HashMap<ProjectId, Vec<OpenIncident>> = HashMap::new();
        for it in incidents::open(tx, &ids).await? {
            open.entry(it.project_id).or_default().push(it);
        }
        let mut found: HashMap<ProjectId, Vec<Found>> = HashMap::new();
        for it in look(tx, &ids).await.map_err(of_a_project)? {
            found.entry(it.project_id).or_default().push(it);
        }
        let mut is_notified = false;
        for project_id in projects {
            let mut open = open.remove(project_id).unwrap_or_default();
            // A later version looks for what this one does not know.
            open.retain(|it| Rule::of_name(&it.rule).is_some());
            let groups = open.iter().filter(|it| it.subject == causes::WITHOUT_WORKERS);
            let groups = groups.map(|it| &*it.alarm).collect();
            let mut found = causes::group(found.remove(project_id).unwrap_or_default(), &groups);
            let findings: Vec<_> = found.iter().map(|it| finding(&it.found)).collect();
            let states: Vec<_> = open.iter().map(state).collect();
            let changes = judge(&states, &findings);
            if !changes.is_empty() {
                causes::name_workers(tx, *project_id, &mut found).await?;
                is_notified |= self.write(tx, *project_id, (changes, &found), &open).await?;
            }
        }
        Ok(is_notified)
    }
}

/// One project that makes a look slow is found by halves, and set aside.
fn of_a_project(error: sqlx::Error) -> sqlx::Error {
    match &error {
        sqlx::Error::Database(it) if it.code().as_deref() == Some(QUERY_CANCELED) => {
            sqlx::Error::Decode(Box::new(error))
        }
        _ => error,
    }
}

fn name_of_open(it: &OpenIncident) -> Name {
    (it.alarm.clone(), it.subject.clone())
}

fn state(it: &OpenIncident) -> Open {
    Open {
        name: name_of_open(it),
        seconds: it.seconds,
        silent_seconds: it.silent_seconds,
        ends_after_seconds: Rule::of_name(&it.rule).map_or(0, Rule::ends_after_seconds),
        is_triggered: it.is_triggered,
    }
}

/// Findings of all alarms of these projects.
async fn look(conn: &mut PgConnection, projects: &[i32]) -> sqlx::Result<Vec<Found>> {
    let mut found = looks::dead_letters(conn, projects).await?;
    found.extend(looks::oldest_ready(conn, projects).await?);
    found.extend(looks::workers_silent(conn, projects).await?);
    found.extend(looks::jobs_lost(conn, projects).await?);
    found.extend(looks::groups_blocked(conn, projects).await?);
    found.extend(looks::groups_waiting(conn, projects).await?);
    found.extend(looks::circuit_open(conn, projects).await?);
    found.extend(looks::schedule_missed(conn, projects).await?);
    found.extend(looks::endpoints(conn, projects).await?);
    found.extend(looks::push_failing(conn, projects).await?);
    found.extend(looks::key_expiring(conn, projects).await?);
    Ok(found)
}

fn name_of(it: &Found) -> Name {
    let of_id = |id| match &*it.rule {
        "key_expiring" => KeyId(id).to_string(),
        _ => EndpointId(id).to_string(),
    };
    let subject = it.subject.clone().or_else(|| it.subject_id.map(of_id));
    (it.alarm.clone(), subject.unwrap_or_default())
}

fn finding(it: &Found) -> Finding {
    Finding { name: name_of(it), is_beyond: it.is_beyond, for_seconds: it.for_seconds }
}

fn new_incident(name: &Name, found: &Grouped, is_triggered: bool) -> NewIncident {
    NewIncident {
        name: name.clone(),
        rule: found.found.rule.clone(),
        details: details(found),
        mail_to: found.found.mail_to.clone(),
        is_triggered,
    }
}

/// JSON.
fn details(Grouped { found: it, queues, lost_by }: &Grouped) -> String {
    let is_url = ["endpoint_disabled", "deliveries_dropped", "push_failing"].contains(&&*it.rule);
    let is_group = ["groups_blocked", "groups_waiting"].contains(&&*it.rule);
    let shown = it.name.as_deref().map(|it| if is_url { shown_host(it) } else { it.to_owned() });
    let details = Details {
        queue: it.queue.clone(),
        job_type: it.job_type.clone(),
        error_type: it.error_type.clone(),
        job_id: it.job_id.map(|it| JobId(it).to_string()),
        group: it.name.clone().filter(|_| is_group),
        schedule: it.subject.clone().filter(|_| it.rule == "schedule_missed"),
        name: shown.filter(|_| !is_group),
        value: it.value,
        return_by: it.return_by,
        queues: queues.clone(),
        lost_by: lost_by.clone(),
    };
    serde_json::to_string(&details).unwrap_or_default()
}
