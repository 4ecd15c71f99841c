//! Members and invitations of a project.

use fencepost_domain::{
    access::{Permission, Role, may_change_member, role_may},
    error::Error,
    ids::{AccountId, InvitationId},
    limits::INVITATION_SECONDS,
};
use fencepost_store::{
    self as store,
    people::{
        audit::NewAuditEntry,
        invitations::{self, Invitation},
        members,
    },
};
use secrecy::SecretString;
use serde_json::json;
use sqlx::{Acquire, PgConnection};

use super::{
    Client,
    author::{Author, Rights, Roles},
    key::SecretHash,
    keys,
    secret::{self, MAIL_PREFIX},
};

/// Changes a member's role, or ends the membership (`to`: none).
///
/// # Errors
/// [`Error::MemberNotFound`]. [`Error::RoleExceedsCaller`] when the author may not grant or revoke
/// such a role. [`Error::LastOwner`] when the project would be left without an owner.
/// [`Error::KeysRemain`] when the membership ends, the member has created live keys, and
/// `revoke_keys` does not say what becomes of them.
pub async fn set_role(
    conn: &mut PgConnection,
    author: &Author<'_>,
    id: AccountId,
    to: Option<Role>,
    revoke_keys: Option<bool>,
) -> Result<Vec<SecretHash>, Error> {
    let project_id = author.project_id;
    let mut tx = conn.begin().await?;
    let roles = Roles::lock(&mut tx, project_id).await?;
    let own = roles.of_author(author)?;
    let from = roles.of(id).ok_or(Error::MemberNotFound)?;
    let is_leaving = to.is_none() && author.rights.account_id() == Some(id);
    if !is_leaving && !may_change_member(own, Some(from), to) {
        return Err(Error::RoleExceedsCaller);
    }
    if from == Role::Owner && to != Some(Role::Owner) && roles.owners() == 1 {
        return Err(Error::LastOwner);
    }
    let mut ended = Vec::new();
    match to {
        Some(to) => members::upsert(&mut tx, project_id, id, to.name()).await?,
        None => {
            let revoke_keys = if manages_keys(own.name()) { revoke_keys } else { Some(false) };
            ended = keys::revoke_created(&mut tx, author, id.to_string(), revoke_keys).await?;
            members::delete(&mut tx, project_id, id).await?;
        }
    }
    if to < Some(from) {
        // Invitations that the member made with the old role end with it.
        invitations::delete_by(&mut tx, project_id, id).await?;
    }
    let facts = |role: Role| json!({ "role": role }).to_string();
    let entry = NewAuditEntry {
        action: if to.is_some() { "member.changed" } else { "member.removed" },
        target: Some(id.to_string()),
        before: Some(facts(from)),
        after: to.map(facts),
    };
    store::people::audit::insert(&mut tx, project_id, &author.actor, &entry).await?;
    tx.commit().await?;
    Ok(ended)
}

/// True if a member with this role manages keys. Others that leave are not asked about keys that
/// they created in an earlier role, and those stay valid.
fn manages_keys(role: &str) -> bool {
    Role::of_name(role).is_some_and(|it| role_may(it, Permission::Administer))
}

/// Ends all memberships of an account that is deleted, with its invitations, and revokes the keys
/// that it has created, if `revoke_keys` says so.
///
/// # Errors
/// [`Error::KeysRemain`] when it does not say what to do with such keys.
pub(super) async fn leave_all(
    conn: &mut PgConnection,
    id: AccountId,
    client: &Client,
    revoke_keys: Option<bool>,
) -> Result<(), Error> {
    let mut left = members::leave_all(conn, id).await?;
    // Changes of a project's keys take turns: all take these in the same order.
    left.sort_unstable_by_key(|it| it.0);
    if revoke_keys.is_none() {
        let mut remaining = Vec::new();
        for (project_id, role) in &left {
            if !manages_keys(role) {
                continue;
            }
            let created = keys::find_created(conn, *project_id, id.to_string()).await?;
            let lasting = created.into_iter().filter(|it| !it.is_exchanged);
            remaining.extend(lasting.map(keys::remaining));
        }
        if !remaining.is_empty() {
            return Err(Error::KeysRemain(remaining));
        }
    }
    for (project_id, role) in left {
        let actor = client.actor("account", id.to_string());
        let author = Author { project_id, actor, rights: Rights::Member(id) };
        // Without an answer there are no such keys: they were looked for above.
        if manages_keys(&role) && revoke_keys.is_some() {
            keys::revoke_created(conn, &author, id.to_string(), revoke_keys).await?;
        }
        let entry = NewAuditEntry {
            before: Some(json!({ "role": role }).to_string()),
            ..NewAuditEntry::to("member.removed", id.to_string())
        };
        store::people::audit::insert(conn, project_id, &author.actor, &entry).await?;
    }
    Ok(())
}

/// Invites an address, unless the project has `max` members and open invitations. Returns the
/// invitation and its token, which is stored nowhere.
///
/// # Errors
/// [`Error::RoleExceedsCaller`] when the author may not grant the role. [`Error::QuotaExceeded`].
pub async fn invite(
    conn: &mut PgConnection,
    author: &Author<'_>,
    (email, role): (&str, Role),
    max: i64,
) -> Result<(Invitation, SecretString), Error> {
    let project_id = author.project_id;
    let token = secret::generate(MAIL_PREFIX);
    let mut tx = conn.begin().await?;
    let roles = Roles::lock(&mut tx, project_id).await?;
    if !may_change_member(roles.of_author(author)?, None, Some(role)) {
        return Err(Error::RoleExceedsCaller);
    }
    // An open invitation for the address is replaced: an earlier one with a higher role must not
    // stay valid.
    invitations::delete_of_address(&mut tx, project_id, email).await?;
    if members::count(&mut tx, project_id).await? >= max {
        return Err(Error::QuotaExceeded { what: "members and open invitations", max });
    }
    let invitation = invitations::insert(
        &mut tx,
        project_id,
        InvitationId::generate(),
        (email, role.name()),
        &secret::hash(&token),
        author.rights.account_id(),
        INVITATION_SECONDS,
    )
    .await?;
    let entry = NewAuditEntry {
        after: Some(json!({ "email": email, "role": role }).to_string()),
        ..NewAuditEntry::to("invitation.created", invitation.id.to_string())
    };
    store::people::audit::insert(&mut tx, project_id, &author.actor, &entry).await?;
    tx.commit().await?;
    Ok((invitation, token))
}

/// Revokes an invitation, also for a role that the author may not grant: that gives no rights.
///
/// # Errors
/// [`Error::InvitationNotFound`].
pub async fn uninvite(
    conn: &mut PgConnection,
    author: &Author<'_>,
    id: InvitationId,
) -> Result<(), Error> {
    let mut tx = conn.begin().await?;
    let row = invitations::delete(&mut tx, author.project_id, id).await?;
    let row = row.ok_or(Error::InvitationNotFound)?;
    let entry = NewAuditEntry {
        before: Some(json!({ "email": row.email, "role": row.role }).to_string()),
        ..NewAuditEntry::to("invitation.revoked", id.to_string())
    };
    store::people::audit::insert(&mut tx, author.project_id, &author.actor, &entry).await?;
    tx.commit().await?;
    Ok(())
}
