//! Policies and settings: kept as they were sent, given back, and understood by nobody here.

use std::collections::BTreeMap;

use prost::Message as _;
use sha2::{Digest as _, Sha256};
use tonic::Status;
use torpor_proto::{
    opaque::Opaque,
    openshell::{
        sandbox::v1::{
            EffectiveSetting, GetGatewayConfigResponse, GetSandboxConfigRequest, GetSandboxConfigResponse,
            PolicySource, SettingScope,
        },
        v1 as os,
    },
};
use torpor_sandbox::SandboxId;

use super::{OpenShellApi, call::Call};
use crate::{
    error::{ApiError, Code},
    store::{Foreign, Problem, StoreError},
};

/// Settings of one sandbox, or of the gateway.
const MOST_SETTINGS: usize = 500;
/// Longest key of a setting, bytes.
const LONGEST_KEY: usize = 253;

/// The configuration of a sandbox, or of the gateway, as it is kept.
#[derive(Clone, PartialEq, prost::Message)]
struct Config {
    #[prost(message, optional, tag = "1")]
    policy: Option<Opaque>,
    /// How often the policy was set to another one.
    #[prost(uint32, tag = "2")]
    policy_version: u32,
    #[prost(btree_map = "string, message", tag = "3")]
    settings: BTreeMap<String, Opaque>,
    /// How often a setting was changed.
    #[prost(uint64, tag = "4")]
    settings_revision: u64,
    /// What the caller said of the policy.
    #[prost(btree_map = "string, string", tag = "5")]
    annotations: BTreeMap<String, String>,
}

fn decoded(kept: Option<(u64, Vec<u8>)>) -> (u64, Config) {
    let (version, body) = kept.unwrap_or_default();
    // What can't be read was written by another version, and is as good as none.
    (version, Config::decode(body.as_slice()).unwrap_or_default())
}

/// How often a policy was set.
pub fn policy_version(kept: Option<(u64, Vec<u8>)>) -> u32 {
    decoded(kept).1.policy_version
}

fn hash(policy: Option<&Opaque>) -> String {
    policy.map_or_else(String::new, |policy| format!("{:x}", Sha256::digest(policy.bytes())))
}

/// Keeps the policy that a sandbox is created with.
///
/// # Errors
/// The store's.
pub fn begin(tables: &Foreign<'_>, id: &SandboxId, policy: &Opaque) -> Result<(), StoreError> {
    let config = Config { policy: Some(policy.clone()), policy_version: 1, ..Config::default() };
    tables.set_config(Some(id), &config.encode_to_vec()).map(drop)
}

impl Config {
    /// Applies what is asked for; whether a setting was deleted.
    fn apply(&mut self, message: os::UpdateConfigRequest) -> Result<bool, Problem> {
        if let Some(policy) = message.policy {
            if self.policy.as_ref() != Some(&policy) {
                self.policy_version += 1;
            }
            self.policy = Some(policy);
            self.annotations = message.annotations;
        }
        if message.setting_key.is_empty() {
            return Ok(false);
        }
        if message.delete_setting {
            let deleted = self.settings.remove(&message.setting_key).is_some();
            self.settings_revision += u64::from(deleted);
            return Ok(deleted);
        }
        let value = message.setting_value.unwrap_or_default();
        let same = self.settings.insert(message.setting_key, value.clone()).is_some_and(|old| old == value);
        self.settings_revision += u64::from(!same);
        if self.settings.len() > MOST_SETTINGS {
            let problem = format!("{MOST_SETTINGS} settings are the most");
            return Err(Problem::Invalid { field: "setting_key", problem });
        }
        Ok(false)
    }
}

fn checked(message: &os::UpdateConfigRequest) -> Result<(), ApiError> {
    let key = &message.setting_key;
    if key.len() > LONGEST_KEY || key.contains(char::is_control) {
        return Err(ApiError::invalid("setting_key", format!("at most {LONGEST_KEY} printable bytes")));
    }
    if !message.merge_operations.is_empty() {
        let text = "merge_operations: policies are kept here and not understood; send the whole policy";
        return Err(ApiError::new(Code::Unimplemented, "POLICY_NOT_UNDERSTOOD", text));
    }
    if key.is_empty() && (message.delete_setting || message.setting_value.is_some()) {
        return Err(ApiError::invalid("setting_key", "the key of the setting is needed"));
    }
    if !key.is_empty() && !message.delete_setting && message.setting_value.is_none() {
        return Err(ApiError::invalid("setting_value", "a value is needed (or delete_setting)"));
    }
    if key.is_empty() && message.policy.is_none() {
        return Err(ApiError::invalid("policy", "a policy or a setting is needed"));
    }
    if message.global && !message.sandbox.is_empty() {
        return Err(ApiError::invalid("global", "a configuration is the gateway's or a sandbox's"));
    }
    Ok(())
}

pub async fn update(
    api: &OpenShellApi,
    call: Call,
    mut message: os::UpdateConfigRequest,
) -> Result<os::UpdateConfigResponse, Status> {
    let request_id = std::mem::take(&mut message.request_id);
    let key = call.once(request_id, "openshell update config", &message)?;
    checked(&message)?;
    let id = if message.global {
        call.caller.speaks_of("the gateway's own");
        if !call.caller.is_admin() {
            let text = "the gateway's own configuration is for its administrators";
            return Err(ApiError::new(Code::PermissionDenied, "PERMISSION_DENIED", text).into());
        }
        None
    } else {
        let record = call.record(&api.service, message.workspace_scope.take(), &message.sandbox).await?;
        Some(record.id.clone())
    };
    let answer = api.service.store.foreign_once(key, move |tables| {
        let (version, mut config) = decoded(tables.config(id.as_ref())?);
        let expected = message.expected_resource_version;
        if expected > 0 && expected != version {
            return Err(Problem::Stale { what: "the configuration".into(), expected, found: version }.into());
        }
        let deleted = config.apply(message)?;
        tables.set_config(id.as_ref(), &config.encode_to_vec())?;
        let response = os::UpdateConfigResponse {
            version: config.policy_version,
            policy_hash: hash(config.policy.as_ref()),
            settings_revision: config.settings_revision,
            deleted,
            annotations: config.annotations,
        };
        Ok(response.encode_to_vec())
    });
    let answer = answer.await?;
    Ok(os::UpdateConfigResponse::decode(answer.as_slice()).map_err(ApiError::internal)?)
}

/// A sandbox's own, under the gateway's: what the gateway says holds for all.
pub async fn of_sandbox(
    api: &OpenShellApi,
    call: Call,
    message: GetSandboxConfigRequest,
) -> Result<GetSandboxConfigResponse, Status> {
    let record = call.record(&api.service, message.workspace_scope, &message.name).await?;
    let id = record.id.clone();
    let read = api.service.store.foreign(move |tables| Ok((tables.config(Some(&id))?, tables.config(None)?)));
    let (own, global) = read.await?;
    let ((revision, own), (_, global)) = (decoded(own), decoded(global));
    Ok(GetSandboxConfigResponse {
        workspace: record.spec.workspace.clone(),
        ..effective(revision, own, global)
    })
}

fn effective(revision: u64, own: Config, global: Config) -> GetSandboxConfigResponse {
    let scoped = |scope: SettingScope| {
        move |(key, value): (String, Opaque)| {
            (key, EffectiveSetting { value: Some(value), scope: scope.into() })
        }
    };
    let mut settings: BTreeMap<_, _> = own.settings.into_iter().map(scoped(SettingScope::Sandbox)).collect();
    settings.extend(global.settings.into_iter().map(scoped(SettingScope::Global)));
    let (policy, policy_source) = match (global.policy, own.policy) {
        (Some(policy), _) => (Some(policy), PolicySource::Global),
        (None, Some(policy)) => (Some(policy), PolicySource::Sandbox),
        (None, None) => (None, PolicySource::Unspecified),
    };
    GetSandboxConfigResponse {
        policy_hash: hash(policy.as_ref()),
        policy,
        version: own.policy_version,
        settings,
        config_revision: revision,
        policy_source: policy_source.into(),
        global_policy_version: global.policy_version,
        settings_revision: own.settings_revision,
        ..GetSandboxConfigResponse::default()
    }
}

pub async fn of_gateway(api: &OpenShellApi) -> Result<GetGatewayConfigResponse, Status> {
    let kept = api.service.store.foreign(|tables| tables.config(None)).await?;
    let (_, config) = decoded(kept);
    Ok(GetGatewayConfigResponse { settings: config.settings, settings_revision: config.settings_revision })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn setting(key: &str, value: &[u8]) -> os::UpdateConfigRequest {
        os::UpdateConfigRequest {
            setting_key: key.into(),
            setting_value: Some(value.to_vec().into()),
            ..os::UpdateConfigRequest::default()
        }
    }

    #[test]
    fn revisions_count_changes_and_not_calls() {
        let mut config = Config::default();
        for value in [&[8_u8, 1][..], &[8, 1], &[8, 2]] {
            config.apply(setting("a", value)).unwrap();
        }
        assert_eq!(config.settings_revision, 2);
        let delete = os::UpdateConfigRequest {
            setting_key: "a".into(),
            delete_setting: true,
            ..os::UpdateConfigRequest::default()
        };
        assert!(config.apply(delete.clone()).unwrap());
        assert!(!config.apply(delete).unwrap(), "it was gone already");
        assert_eq!(config.settings_revision, 3);
    }

    #[test]
    fn what_the_gateway_says_holds_for_every_sandbox() {
        let (mut own, mut global) = (Config::default(), Config::default());
        own.apply(setting("a", &[8, 1])).unwrap();
        own.apply(setting("b", &[8, 1])).unwrap();
        global.apply(setting("b", &[8, 9])).unwrap();
        global.policy = Some(vec![8, 7].into());
        let shown = effective(4, own, global);
        assert_eq!(shown.settings["a"].scope(), SettingScope::Sandbox);
        assert_eq!(shown.settings["b"].value, Some(vec![8, 9].into()));
        assert_eq!((shown.policy_source(), shown.policy), (PolicySource::Global, Some(vec![8, 7].into())));
    }

    #[test]
    fn half_a_request_is_refused() {
        let setting_without_key = os::UpdateConfigRequest {
            setting_value: Some(vec![8, 1].into()),
            ..os::UpdateConfigRequest::default()
        };
        assert!(checked(&setting_without_key).is_err());
        assert!(checked(&os::UpdateConfigRequest::default()).is_err());
        assert!(
            checked(&os::UpdateConfigRequest { global: true, sandbox: "a".into(), ..setting("k", &[]) })
                .is_err()
        );
        assert!(checked(&setting("k", &[8, 1])).is_ok());
    }
}
