//! Providers: credentials and settings under a name, kept and attached to sandboxes, and never looked into. No answer holds a
//! credential.

use std::{collections::BTreeMap, time::SystemTime};

use prost::Message as _;
use prost_types::Timestamp;
use tonic::Status;
use torpor_proto::openshell::{
    datamodel::v1::{ObjectMeta, Provider},
    v1::{self as os, DeletionOutcome, ProviderMutationKind},
};
use torpor_sandbox::{
    id::clip,
    spec::{unqualified, validate_annotations, validate_labels},
};

use super::{
    OpenShellApi,
    call::{Call, Named},
    page,
};
use crate::{
    access::REDACTED,
    api::convert::time,
    error::ApiError,
    store::{Kind, Listing, NewObject, Object, Problem, Record, RequestKey, Selector, StoreError},
};

/// Longest name, bytes.
const LONGEST_NAME: usize = 253;

fn checked_name(name: &str) -> Result<(), ApiError> {
    let fits = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if name.is_empty() || name.len() > LONGEST_NAME || !name.chars().all(fits) {
        let problem = format!(
            "'{}': letters, digits, '-', '_' and '.', at most {LONGEST_NAME}",
            clip(name).escape_debug()
        );
        return Err(ApiError::invalid("provider.metadata.name", problem));
    }
    Ok(())
}

fn body(object: &Object) -> Result<Provider, StoreError> {
    let unreadable = |error: prost::DecodeError| Problem::Invalid {
        field: "provider",
        problem: format!("'{}' was written by another version: {error}", object.name),
    };
    Ok(Provider::decode(object.body.as_slice()).map_err(unreadable)?)
}

/// Without its metadata, which is the object's own; but its annotations.
fn encoded(mut provider: Provider, annotations: BTreeMap<String, String>) -> Vec<u8> {
    provider.metadata = Some(ObjectMeta { annotations, ..ObjectMeta::default() });
    provider.encode_to_vec()
}

fn shown(object: &Object) -> Result<Provider, StoreError> {
    let mut provider = body(object)?;
    let annotations = provider.metadata.take().unwrap_or_default().annotations;
    provider.credentials.values_mut().for_each(|value| REDACTED.clone_into(value));
    provider.metadata = Some(ObjectMeta {
        id: object.id.clone(),
        name: object.name.clone(),
        created_time: time(object.created),
        labels: object.labels.clone(),
        resource_version: object.version,
        annotations,
        workspace: object.workspace.clone(),
        deletion_time: None,
    });
    Ok(provider)
}

fn response(object: &Object) -> Result<Vec<u8>, StoreError> {
    let response = os::ProviderResponse {
        provider: Some(shown(object)?),
        target_receipts: Vec::new(),
        mutation_id: format!("{}-{}", object.id, object.version),
    };
    Ok(response.encode_to_vec())
}

fn read<M: prost::Message + Default>(answer: &[u8]) -> Result<M, ApiError> {
    M::decode(answer).map_err(ApiError::internal)
}

/// What a client says of a provider's labels and annotations.
fn checked(metadata: &ObjectMeta) -> Result<(), ApiError> {
    validate_labels(&metadata.labels)?;
    Ok(validate_annotations(&metadata.annotations)?)
}

pub async fn create(
    api: &OpenShellApi,
    call: Call,
    mut message: os::CreateProviderRequest,
) -> Result<os::ProviderResponse, Status> {
    let request_id = std::mem::take(&mut message.request_id);
    let key = call.once(request_id, "openshell create provider", &message)?;
    let workspace = call.present(&api.service, message.workspace_scope).await?;
    let mut provider =
        message.provider.ok_or_else(|| ApiError::invalid("provider", "a provider is needed"))?;
    let metadata = provider.metadata.take().unwrap_or_default();
    checked_name(&metadata.name)?;
    checked(&metadata)?;
    unredacted(provider.credentials.clone(), &BTreeMap::new())?;
    call.caller.speaks_of(&format!("{workspace}/{}", metadata.name));
    let new = NewObject {
        workspace,
        sandbox: None,
        name: metadata.name,
        labels: metadata.labels,
        body: encoded(provider, metadata.annotations),
    };
    let made = api.service.store.foreign_once(key, move |tables| response(&tables.add(Kind::Provider, new)?));
    Ok(read(&made.await?)?)
}

pub async fn get(
    api: &OpenShellApi,
    call: Call,
    message: os::GetProviderRequest,
) -> Result<os::ProviderResponse, Status> {
    let workspace = call.present(&api.service, message.workspace_scope).await?;
    let found = api
        .service
        .store
        .foreign(move |tables| response(&tables.get(Kind::Provider, &workspace, None, &message.name)?));
    Ok(read(&found.await?)?)
}

pub async fn list(
    api: &OpenShellApi,
    call: Call,
    message: os::ListProvidersRequest,
) -> Result<os::ListProvidersResponse, Status> {
    let (size, after) = page::asked(message.page_size, &message.page_token)?;
    let (scope, ..) = call.scope(&api.service, message.workspace_scope).await?;
    let selector = message.label_selector.parse::<Selector>()?.within(scope);
    let listing = Listing { kind: Kind::Provider, sandbox: None, selector, size, after };
    let (objects, more) = api.service.store.foreign(move |tables| tables.list(&listing)).await?;
    Ok(os::ListProvidersResponse {
        next_page_token: page::next(&objects, more),
        providers: objects.iter().map(shown).collect::<Result<_, _>>()?,
    })
}

/// Named keys are set, or taken away by an empty value; all others stay.
fn merge(into: &mut BTreeMap<String, String>, from: BTreeMap<String, String>) {
    for (key, value) in from {
        if value.is_empty() {
            into.remove(&key);
        } else {
            into.insert(key, value);
        }
    }
}

/// Credentials as a client writes them. One that reads as answers show them all is the present one: clients change what they
/// were given and write it back.
fn unredacted(
    from: BTreeMap<String, String>,
    present: &BTreeMap<String, String>,
) -> Result<BTreeMap<String, String>, StoreError> {
    let unknown = |key: &str| Problem::Invalid {
        field: "provider.credentials",
        problem: format!(
            "'{}': {REDACTED} stands for a credential that is there, and none is; give its value",
            clip(key).escape_debug()
        ),
    };
    match from.iter().find(|(key, value)| *value == REDACTED && !present.contains_key(*key)) {
        Some((key, _)) => Err(unknown(key).into()),
        None => Ok(from.into_iter().filter(|(_, value)| value != REDACTED).collect()),
    }
}

/// A change of a provider.
struct Change {
    provider: Provider,
    metadata: ObjectMeta,
    expirations: BTreeMap<String, Timestamp>,
    cleared: Vec<String>,
}

impl Change {
    fn apply(self, mut object: Object) -> Result<Object, StoreError> {
        let expected = self.metadata.resource_version;
        if expected > 0 && expected != object.version {
            let what = format!("provider '{}'", object.name);
            return Err(Problem::Stale { what, expected, found: object.version }.into());
        }
        let mut kept = body(&object)?;
        let from = self.provider;
        if !from.r#type.is_empty() && from.r#type != kept.r#type {
            let problem = format!("it is '{}' and stays so", kept.r#type);
            return Err(Problem::Invalid { field: "provider.type", problem }.into());
        }
        let credentials = unredacted(from.credentials, &kept.credentials)?;
        merge(&mut kept.credentials, credentials);
        merge(&mut kept.config, from.config);
        kept.credential_handles.extend(from.credential_handles);
        kept.credential_expiration_times.extend(from.credential_expiration_times);
        kept.credential_expiration_times.extend(self.expirations);
        for key in self.cleared {
            kept.credential_expiration_times.remove(&key);
        }
        if !from.profile_workspace.is_empty() {
            kept.profile_workspace = from.profile_workspace;
        }
        let mut annotations = kept.metadata.take().unwrap_or_default().annotations;
        if !self.metadata.annotations.is_empty() {
            annotations = self.metadata.annotations;
        }
        if !self.metadata.labels.is_empty() {
            object.labels = self.metadata.labels;
        }
        object.body = encoded(kept, annotations);
        Ok(object)
    }
}

pub async fn update(
    api: &OpenShellApi,
    call: Call,
    mut message: os::UpdateProviderRequest,
) -> Result<os::ProviderResponse, Status> {
    let request_id = std::mem::take(&mut message.request_id);
    let key = call.once(request_id, "openshell update provider", &message)?;
    let workspace = call.present(&api.service, message.workspace_scope).await?;
    let mut provider =
        message.provider.ok_or_else(|| ApiError::invalid("provider", "a provider is needed"))?;
    let metadata = provider.metadata.take().unwrap_or_default();
    checked_name(&metadata.name)?;
    checked(&metadata)?;
    let name = metadata.name.clone();
    call.caller.speaks_of(&format!("{workspace}/{name}"));
    let change = Change {
        provider,
        metadata,
        expirations: message.credential_expiration_times,
        cleared: message.clear_credential_expiration_keys,
    };
    let changed = api.service.store.foreign_once(key, move |tables| {
        let present = tables.get(Kind::Provider, &workspace, None, &name)?;
        response(&tables.replace(change.apply(present)?)?)
    });
    Ok(read(&changed.await?)?)
}

pub async fn delete(
    api: &OpenShellApi,
    call: Call,
    mut message: os::DeleteProviderRequest,
) -> Result<os::DeleteProviderResponse, Status> {
    let request_id = std::mem::take(&mut message.request_id);
    let key = call.once(request_id, "openshell delete provider", &message)?;
    let workspace = call.workspace(message.workspace_scope)?;
    call.caller.speaks_of(&format!("{workspace}/{}", message.name));
    let deleted = api.service.store.foreign_once(key, move |tables| {
        let outcome = match tables.find(Kind::Provider, &workspace, None, &message.name)? {
            Some(object) => {
                tables.remove(Kind::Provider, &object)?;
                DeletionOutcome::Completed
            }
            None if message.allow_missing => DeletionOutcome::AlreadyAbsent,
            None => return Err(Problem::Missing { kind: Kind::Provider, name: clip(&message.name) }.into()),
        };
        Ok(os::DeleteProviderResponse { outcome: outcome.into() }.encode_to_vec())
    });
    Ok(read(&deleted.await?)?)
}

pub async fn attached(
    api: &OpenShellApi,
    call: Call,
    message: os::ListSandboxProvidersRequest,
) -> Result<os::ListSandboxProvidersResponse, Status> {
    let (size, after) = page::asked(message.page_size, &message.page_token)?;
    let record = call.record(&api.service, message.workspace_scope, &message.sandbox).await?;
    let id = record.id.clone();
    let mut objects = api.service.store.foreign(move |tables| tables.attached(&id)).await?;
    if let Some([_, _, name]) = after {
        objects.retain(|object| object.name > name);
    }
    let more = objects.len() > size;
    objects.truncate(size);
    Ok(os::ListSandboxProvidersResponse {
        next_page_token: page::next(&objects, more),
        providers: objects.iter().map(shown).collect::<Result<_, _>>()?,
    })
}

/// Attaches a provider or takes it back; `attached` says whether that changed anything.
async fn turn(
    api: &OpenShellApi,
    call: Call,
    key: Option<RequestKey>,
    record: &Record,
    provider: String,
    expected: u64,
    kind: ProviderMutationKind,
) -> Result<os::AttachSandboxProviderResponse, Status> {
    let workspace = record.spec.workspace.clone();
    let (id, name) = (record.id.clone(), unqualified(&record.name).1.to_owned());
    let done = api.service.store.foreign_once(key, move |tables| {
        tables.expect_sandbox(&id, expected)?;
        let object = tables.get(Kind::Provider, &workspace, None, &provider)?;
        let changed = match kind {
            ProviderMutationKind::Attach => tables.attach(&id, &object)?,
            _ => tables.detach(&id, &object)?,
        };
        let mutation = format!("{}-{}-{}", id, object.id, object.version);
        let receipt = os::ProviderMutationReceipt {
            receipt_id: mutation.clone(),
            mutation_id: mutation,
            provider,
            workspace,
            kind: kind.into(),
            desired: Some(os::ProviderDesiredIdentity {
                sandbox_id: id.to_string(),
                sandbox: name,
                provider_id: object.id,
                provider_resource_version: object.version,
                ..os::ProviderDesiredIdentity::default()
            }),
            persisted_time: time(SystemTime::now()),
        };
        let answer =
            os::AttachSandboxProviderResponse { sandbox: None, attached: changed, receipt: Some(receipt) };
        Ok(answer.encode_to_vec())
    });
    let done: os::AttachSandboxProviderResponse = read(&done.await?)?;
    // A retry is about the first one's sandbox, whatever has its name now.
    let desired = done.receipt.as_ref().and_then(|receipt| receipt.desired.as_ref());
    let key = desired.map_or_else(|| record.id.to_string(), |desired| desired.sandbox_id.clone());
    let named = Named { workspace: record.spec.workspace.clone(), key };
    let sandbox = api.present(&call, &named).await?;
    Ok(os::AttachSandboxProviderResponse { sandbox: Some(api.show(sandbox).await?), ..done })
}

pub async fn attach(
    api: &OpenShellApi,
    call: Call,
    mut message: os::AttachSandboxProviderRequest,
) -> Result<os::AttachSandboxProviderResponse, Status> {
    let request_id = std::mem::take(&mut message.request_id);
    let key = call.once(request_id, "openshell attach", &message)?;
    let record = call.record(&api.service, message.workspace_scope, &message.sandbox).await?;
    let (expected, kind) = (message.expected_resource_version, ProviderMutationKind::Attach);
    turn(api, call, key, &record, message.provider, expected, kind).await
}

pub async fn detach(
    api: &OpenShellApi,
    call: Call,
    mut message: os::DetachSandboxProviderRequest,
) -> Result<os::DetachSandboxProviderResponse, Status> {
    let request_id = std::mem::take(&mut message.request_id);
    let key = call.once(request_id, "openshell detach", &message)?;
    let record = call.record(&api.service, message.workspace_scope, &message.sandbox).await?;
    let (expected, kind) = (message.expected_resource_version, ProviderMutationKind::Detach);
    let os::AttachSandboxProviderResponse { sandbox, attached: detached, receipt } =
        turn(api, call, key, &record, message.provider, expected, kind).await?;
    Ok(os::DetachSandboxProviderResponse { sandbox, detached, receipt })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair(k: &str, v: &str) -> (String, String) {
        (k.to_owned(), v.to_owned())
    }

    fn kept() -> Object {
        let provider = Provider {
            r#type: "openai".into(),
            credentials: [pair("KEY", "secret-1"), pair("OLD", "secret-2")].into(),
            config: [pair("url", "a")].into(),
            ..Provider::default()
        };
        Object {
            id: "provider-1".into(),
            workspace: "default".into(),
            sandbox: None,
            name: "p".into(),
            version: 3,
            labels: BTreeMap::new(),
            body: encoded(provider, [pair("note", "n")].into()),
            created: SystemTime::UNIX_EPOCH,
        }
    }

    #[test]
    fn no_answer_holds_a_credential() {
        let shown = shown(&kept()).unwrap();
        assert_eq!(shown.credentials, [pair("KEY", REDACTED), pair("OLD", REDACTED)].into());
        let text = String::from_utf8_lossy(&response(&kept()).unwrap()).into_owned();
        assert!(!text.contains("secret-"), "{text}");
        assert_eq!(shown.metadata.unwrap().annotations, [pair("note", "n")].into());
    }

    #[test]
    fn an_update_names_what_it_changes_and_leaves_the_rest() {
        let change = |version, kind: &str| Change {
            provider: Provider {
                r#type: kind.into(),
                credentials: [pair("KEY", "new"), pair("OLD", "")].into(),
                ..Provider::default()
            },
            metadata: ObjectMeta { resource_version: version, ..ObjectMeta::default() },
            expirations: BTreeMap::new(),
            cleared: Vec::new(),
        };
        let after = body(&change(3, "").apply(kept()).unwrap()).unwrap();
        assert_eq!(after.credentials, [pair("KEY", "new")].into());
        assert_eq!(after.config, [pair("url", "a")].into());
        let back = shown(&kept()).unwrap();
        let change_back = Change {
            provider: Provider { credentials: back.credentials, ..change(3, "").provider },
            ..change(3, "")
        };
        assert_eq!(
            body(&change_back.apply(kept()).unwrap()).unwrap().credentials,
            body(&kept()).unwrap().credentials
        );
        assert!(change(2, "").apply(kept()).unwrap_err().to_string().contains("stale"));
        assert!(change(0, "other").apply(kept()).unwrap_err().to_string().contains("stays so"));
    }

    #[test]
    fn what_was_shown_redacted_and_is_written_back_stays() {
        let change = |credentials: &[(String, String)]| Change {
            provider: Provider { credentials: credentials.iter().cloned().collect(), ..Provider::default() },
            metadata: ObjectMeta::default(),
            expirations: BTreeMap::new(),
            cleared: Vec::new(),
        };
        let written = change(&[pair("KEY", REDACTED), pair("OLD", "new")]);
        let after = body(&written.apply(kept()).unwrap()).unwrap();
        assert_eq!(after.credentials, [pair("KEY", "secret-1"), pair("OLD", "new")].into());
        let unknown = change(&[pair("MORE", REDACTED)]).apply(kept()).unwrap_err();
        assert!(unknown.to_string().contains("'MORE'"), "{unknown}");
    }

    #[test]
    fn names_are_of_a_few_letters() {
        for name in ["a", "my-provider_1.x"] {
            assert!(checked_name(name).is_ok(), "{name}");
        }
        for name in ["", "a/b", "a b", "a\n", &"x".repeat(254)] {
            assert!(checked_name(name).is_err(), "{name}");
        }
    }
}
