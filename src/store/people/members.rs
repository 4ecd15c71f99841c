//! Members of projects, and invitations.

use chrono::{DateTime, Utc};
use sqlx::PgConnection;

use fencepost_domain::{
    alarm::MailReaders,
    ids::{AccountId, ProjectId, ProjectPublicId},
};

/// A member of a project.
#[derive(Debug, Clone)]
pub struct Member {
    pub account_id: AccountId,
    pub email: String,
    pub role: String,
    /// Member since.
    pub created_at: DateTime<Utc>,
}

/// A project that an account is a member of.
#[derive(Debug, Clone)]
pub struct Membership {
    pub project_id: ProjectId,
    pub public_id: ProjectPublicId,
    pub slug: String,
    pub name: String,
    /// `live` or `test`.
    pub mode: String,
    /// `ambiguous` or `always`.
    pub require_fence: String,
    pub default_lease_seconds: Option<i32>,
    /// Whether an expired lease counts as a failure.
    pub losses_count_as_failures: bool,
    pub plan: String,
    /// Overrides of the plan's limits.
    pub overrides: Option<serde_json::Value>,
    pub created_at: DateTime<Utc>,
    /// The account's role.
    pub role: String,
    /// When the operator suspended the project.
    pub suspended_at: Option<DateTime<Utc>>,
    /// Whether the project has an owner with a verified address.
    pub is_verified: bool,
}

/// Adds a member, or changes a member's role.
pub async fn upsert(
    conn: &mut PgConnection,
    project_id: ProjectId,
    account_id: AccountId,
    role: &str,
) -> sqlx::Result<()> {
    sqlx::query!(
        "
        insert into members (project_id, account_id, role)
        values ($1, $2, $3)
        on conflict (project_id, account_id) do update set role = excluded.role
        ",
        project_id.0,
        account_id.0,
        role,
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// The role of each member, locked until the transaction ends, so that two owners cannot leave at
/// the same time.
pub async fn lock_roles(
    conn: &mut PgConnection,
    project_id: ProjectId,
) -> sqlx::Result<Vec<(AccountId, String)>> {
    let rows = sqlx::query!(
        r#"
        select account_id "account_id: AccountId", role
        from members
        where project_id = $1
        order by account_id
        for update
        "#,
        project_id.0,
    )
    .fetch_all(conn)
    .await?;
    Ok(rows.into_iter().map(|it| (it.account_id, it.role)).collect())
}

/// Removes a member.
pub async fn delete(
    conn: &mut PgConnection,
    project_id: ProjectId,
    account_id: AccountId,
) -> sqlx::Result<()> {
    sqlx::query!(
        "delete from members where project_id = $1 and account_id = $2",
        project_id.0,
        account_id.0,
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// A project's members, oldest first.
pub async fn list(
    conn: &mut PgConnection,
    project_id: ProjectId,
    limit: i64,
) -> sqlx::Result<Vec<Member>> {
    sqlx::query_as!(
        Member,
        r#"
        select member.account_id "account_id: AccountId", account.email, member.role,
               member.created_at
        from members member
        join accounts account on account.id = member.account_id
        where member.project_id = $1
        order by member.created_at, member.account_id
        limit $2
        "#,
        project_id.0,
        limit,
    )
    .fetch_all(conn)
    .await
}

/// Number of members and open invitations of a project.
pub async fn count(conn: &mut PgConnection, project_id: ProjectId) -> sqlx::Result<i64> {
    sqlx::query_scalar!(
        r#"
        select (select count(*) from members where project_id = $1)
             + (select count(*) from invitations where project_id = $1 and expires_at > now()) "count!"
        "#,
        project_id.0,
    )
    .fetch_one(conn)
    .await
}

/// The members who read the mails of a project's alarms.
pub async fn mail_readers(
    conn: &mut PgConnection,
    project_id: ProjectId,
) -> sqlx::Result<MailReaders> {
    sqlx::query_as!(
        MailReaders,
        r#"
        select count(*) > 0 "has_members!",
               coalesce(bool_or(member.role = 'owner' and account.id is not null), false)
                   "has_owners!",
               coalesce(bool_or(member.role = 'admin' and account.id is not null), false)
                   "has_admins!"
        from members member
        left join accounts account
            on account.id = member.account_id and account.verified_at is not null
            and account.suspended_at is null
        where member.project_id = $1
        "#,
        project_id.0,
    )
    .fetch_one(conn)
    .await
}

/// The projects of an account, oldest first.
pub async fn of_account(
    conn: &mut PgConnection,
    account_id: AccountId,
    limit: i64,
) -> sqlx::Result<Vec<Membership>> {
    sqlx::query_as!(
        Membership,
        r#"
        select project.id "project_id: ProjectId", project.public_id "public_id: ProjectPublicId",
               project.slug, project.name, project.mode, project.require_fence,
               project.default_lease_seconds, project.losses_count_as_failures, project.plan,
               project.overrides, project.created_at, member.role, project.suspended_at,
               not exists (
                   select from members owner
                   where owner.project_id = project.id and owner.role = 'owner'
               ) or exists (
                   select from members owner
                   join accounts on accounts.id = owner.account_id
                   where owner.project_id = project.id and owner.role = 'owner'
                       and accounts.verified_at is not null
               ) "is_verified!"
        from members member
        join projects project on project.id = member.project_id and project.deleted_at is null
        where member.account_id = $1
        order by member.project_id
        limit $2
        "#,
        account_id.0,
        limit,
    )
    .fetch_all(conn)
    .await
}

/// An account's membership in the project with this slug or public id.
pub async fn find(
    conn: &mut PgConnection,
    account_id: AccountId,
    slug: &str,
    public_id: Option<ProjectPublicId>,
) -> sqlx::Result<Option<Membership>> {
    sqlx::query_as!(
        Membership,
        r#"
        select project.id "project_id: ProjectId", project.public_id "public_id: ProjectPublicId",
               project.slug, project.name, project.mode, project.require_fence,
               project.default_lease_seconds, project.losses_count_as_failures, project.plan,
               project.overrides, project.created_at, member.role, project.suspended_at,
               not exists (
                   select from members owner
                   where owner.project_id = project.id and owner.role = 'owner'
               ) or exists (
                   select from members owner
                   join accounts on accounts.id = owner.account_id
                   where owner.project_id = project.id and owner.role = 'owner'
                       and accounts.verified_at is not null
               ) "is_verified!"
        from projects project
        join members member on member.project_id = project.id and member.account_id = $1
        where (project.slug = $2 or project.public_id = $3) and project.deleted_at is null
        limit 1
        "#,
        account_id.0,
        slug,
        public_id.map(|it| it.0),
    )
    .fetch_optional(conn)
    .await
}

/// Number of projects of this plan that an account owns.
pub async fn owned(
    conn: &mut PgConnection,
    account_id: AccountId,
    plan: &str,
) -> sqlx::Result<i64> {
    sqlx::query_scalar!(
        r#"
        select count(*) "count!"
        from members member
        join projects project on project.id = member.project_id and project.deleted_at is null
        where member.account_id = $1 and member.role = 'owner' and project.plan = $2
        "#,
        account_id.0,
        plan,
    )
    .fetch_one(conn)
    .await
}

/// Ends all memberships of an account in projects that are not deleted, with the invitations that
/// it has made there. Returns each project with the account's role.
pub async fn leave_all(
    conn: &mut PgConnection,
    account_id: AccountId,
) -> sqlx::Result<Vec<(ProjectId, String)>> {
    let rows = sqlx::query!(
        r#"
        with left_ as (
            delete from members
            using projects
            where members.account_id = $1
                and projects.id = members.project_id and projects.deleted_at is null
            returning members.project_id, members.role
        ), offers as (
            delete from invitations
            using left_
            where invitations.project_id = left_.project_id and invitations.invited_by = $1
        )
        select project_id "project_id: ProjectId", role from left_
        "#,
        account_id.0,
    )
    .fetch_all(conn)
    .await?;
    Ok(rows.into_iter().map(|it| (it.project_id, it.role)).collect())
}

/// Removes all other members, invitations and keys from the projects that an account owns.
pub async fn remove_others(
    conn: &mut PgConnection,
    owner: AccountId,
) -> sqlx::Result<Vec<ProjectId>> {
    sqlx::query_scalar!(
        r#"
        with owned as materialized (
            select project_id from members where account_id = $1 and role = 'owner'
        ), others as (
            delete from members
            using owned
            where members.project_id = owned.project_id and members.account_id <> $1
        ), offers as (
            delete from invitations
            using owned
            where invitations.project_id = owned.project_id
        ), ended_keys as (
            update api_keys
            set revoked_at = now()
            from owned
            where api_keys.project_id = owned.project_id and api_keys.revoked_at is null
        )
        select project_id "project_id: ProjectId" from owned
        "#,
        owner.0,
    )
    .fetch_all(conn)
    .await
}

/// Locks the members of all projects that an account owns, so that two owners cannot leave at the
/// same time.
pub async fn lock_owned(conn: &mut PgConnection, owner: AccountId) -> sqlx::Result<()> {
    sqlx::query!(
        "
        select member.project_id
        from members own
        join members member on member.project_id = own.project_id
        where own.account_id = $1 and own.role = 'owner'
        order by member.project_id, member.account_id
        for update of member
        ",
        owner.0,
    )
    .fetch_all(conn)
    .await?;
    Ok(())
}

/// Whether a project has owners, and none of them has a verified address.
pub async fn is_unverified(conn: &mut PgConnection, project_id: ProjectId) -> sqlx::Result<bool> {
    sqlx::query_scalar!(
        r#"
        select count(*) > 0 and count(account.verified_at) = 0 "is_unverified!"
        from members
        join accounts account on account.id = members.account_id
        where members.project_id = $1 and members.role = 'owner'
        "#,
        project_id.0,
    )
    .fetch_one(conn)
    .await
}
