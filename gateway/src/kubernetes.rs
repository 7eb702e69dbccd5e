//! The kubernetes driver's part of the configuration, the identity of its objects, and what its doctor finds.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use serde::{Deserialize, Serialize};
use torpor_driver_kubernetes::{
    AgentLink, ConfigError, KubernetesConfig, KubernetesDriver, diagnose, folder,
};
use torpor_sandbox::SandboxId;

use crate::{
    Config,
    doctor::Check,
    serve::ServeError,
    store::{Store, StoreError},
};

/// Where the database keeps the identity, so that a copy of it finds the cluster's objects again.
const IDENTITY: &str = "kubernetes_identity";

/// Why it is not known which of the cluster's objects are this gateway's.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum IdentityError {
    /// Neither database nor folder has it.
    #[error(
        "the database knows {count} sandboxes in the cluster, and neither it nor {} says by which label their objects are found: put that file back, or write into it what `kubectl get sandboxes,pvc -A -L torpor.dev/gateway` shows for them (torpor-{example}); with another one none of them is found, and they are left where they are", path.display())]
    Lost {
        /// Records.
        count: usize,
        /// One of them.
        example: SandboxId,
        /// The file.
        path: PathBuf,
    },
    /// They say different things, and there are sandboxes of both.
    #[error(
        "the database is of the gateway '{database}' of the cluster, and {} holds {count} sandboxes of the gateway '{file}', which it doesn't know: put the database of that folder back (torpor admin restore FILE), or make it anew from the folder (torpor admin rebuild --force), or move the folder away; what lasts of the database's own sandboxes is written there again", folder.display())]
    Another {
        /// The database's.
        database: String,
        /// The folder's.
        file: String,
        /// Folders that the database doesn't know.
        count: usize,
        /// The folder.
        folder: PathBuf,
    },
    /// The folder.
    #[error("read or write {}: {source}", path.display())]
    Folder {
        /// Which.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The database.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// The driver, by the identity that the database knows. Where the driver's folder is lost, it is written again from the
/// database: the specs, and the identity last.
pub(crate) async fn open(config: &Config, store: &Arc<Store>) -> Result<Arc<KubernetesDriver>, ServeError> {
    let driver = config.kubernetes.for_driver(config)?;
    let kept = store.meta(IDENTITY).await.map_err(IdentityError::from)?;
    know(config, store, kept.as_deref()).await?;
    let driver = KubernetesDriver::new(driver).await?;
    if kept.is_none() {
        store.set_meta(IDENTITY, driver.identity().to_owned()).await.map_err(IdentityError::from)?;
    }
    Ok(driver)
}

async fn know(config: &Config, store: &Arc<Store>, kept: Option<&str>) -> Result<(), IdentityError> {
    let state_dir = &config.state_dir;
    let path = folder::path(state_dir);
    let failed = |source| IdentityError::Folder { path: path.clone(), source };
    let filed = folder::identity(state_dir).map_err(failed)?;
    if kept.is_some() && filed.as_deref() == kept {
        return Ok(());
    }
    let specs = store.of_driver("kubernetes").await?;
    let identity = match (kept, filed) {
        (Some(kept), None) => kept.to_owned(),
        (Some(kept), Some(file)) => {
            let known = store.all_ids().await?;
            let there = folder::ids(state_dir).map_err(failed)?;
            let count = there.iter().filter(|id| !known.contains(id)).count();
            if count > 0 {
                return Err(IdentityError::Another { database: kept.to_owned(), file, count, folder: path });
            }
            tracing::warn!(database = kept, file, "the identity of the cluster's objects is the database's");
            kept.to_owned()
        }
        // A database that was made before it kept one, or was made anew.
        (None, Some(file)) => file,
        (None, None) => {
            let Some((example, ..)) = specs.first() else { return Ok(()) };
            let (count, example) = (specs.len(), example.clone());
            return Err(IdentityError::Lost { count, example, path: path.join("identity") });
        }
    };
    let written = folder::restore(state_dir, &identity, &specs).map_err(failed)?;
    if written > 0 {
        tracing::warn!(written, folder = %path.display(), "specs were lost, and are written again from the database");
    }
    Ok(())
}

const EXEC: &str = "exec";
const MTLS: &str = "mtls";

/// `[kubernetes]`: the cluster, and what its pods are like.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct KubernetesSection {
    /// A kubeconfig file; where kubectl looks, or the pod's own service account, when empty.
    pub kubeconfig: PathBuf,
    /// A context of it; the current one when empty.
    pub context: String,
    /// Where sandboxes are made; the context's namespace when empty.
    pub namespace: String,
    /// The image whose program /torpor-agent is the static agent.
    pub agent_image: String,
    /// Storage class of workspaces; the cluster's default when empty.
    pub storage_class: String,
    /// Runtime class of every pod; the cluster's default when empty.
    pub runtime_class: String,
    /// Service account of every pod, without its token; the namespace's default when empty.
    pub service_account: String,
    /// Where the workspace is mounted.
    pub mount_path: String,
    /// Size of a workspace that asks for none, bytes.
    pub workspace_bytes: u64,
    /// Workspaces are claim templates of the Sandbox objects, and gone with them.
    pub claim_templates: bool,
    /// How long a pod may take to be gone after its grace, seconds.
    pub stop_margin_seconds: u64,
    /// How often everything is listed and compared with what the watches told, seconds.
    pub compare_seconds: u64,
    /// Namespaces of workspaces that have their own.
    pub namespaces: BTreeMap<String, String>,
    /// Labels of the nodes that pods run on.
    pub node_selector: BTreeMap<String, String>,
    /// Further fields of every pod, of those that may be set.
    pub pod: toml::Table,
    /// What the `driver_config` of a sandbox or template may say.
    pub driver_config: BTreeSet<String>,
    /// The agent's image is mounted as a volume, in place of an init container that copies it.
    pub agent_volume: bool,
    /// How agents are reached: "exec", by the API server; "mtls", on a port of their own.
    pub agent_link: String,
    /// That port.
    pub agent_port: u16,
}

impl Default for KubernetesSection {
    fn default() -> Self {
        let driver = KubernetesConfig::new("/", "");
        Self {
            kubeconfig: PathBuf::new(),
            context: String::new(),
            namespace: String::new(),
            agent_image: concat!("torpor-agent:", env!("CARGO_PKG_VERSION")).to_owned(),
            storage_class: String::new(),
            runtime_class: String::new(),
            service_account: String::new(),
            mount_path: driver.mount_path,
            workspace_bytes: driver.workspace_bytes,
            claim_templates: driver.claim_templates,
            stop_margin_seconds: driver.stop_margin.as_secs(),
            compare_seconds: driver.compare_every.as_secs(),
            namespaces: BTreeMap::new(),
            node_selector: BTreeMap::new(),
            pod: toml::Table::new(),
            driver_config: driver.driver_config,
            agent_volume: driver.agent_volume,
            agent_link: EXEC.to_owned(),
            agent_port: driver.agent_port,
        }
    }
}

impl KubernetesSection {
    /// What the driver is told.
    ///
    /// # Errors
    /// A value under `pod` that no object of a cluster can have.
    pub fn for_driver(&self, config: &Config) -> Result<KubernetesConfig, ConfigError> {
        let agent_link = match self.agent_link.as_str() {
            EXEC => AgentLink::Exec,
            MTLS => AgentLink::Mtls,
            other => {
                let problem = format!(
                    "'{}' is neither \"{EXEC}\", by the API server's exec, nor \"{MTLS}\", on a port of their own",
                    other.escape_debug()
                );
                return Err(ConfigError::Value { key: "agent_link", problem });
            }
        };
        let given = |text: &String| Some(text.clone()).filter(|text| !text.is_empty());
        let pod = serde_json::to_value(&self.pod)
            .map_err(|error| ConfigError::Value { key: "pod", problem: error.to_string() })?;
        Ok(KubernetesConfig {
            kubeconfig: Some(self.kubeconfig.clone()).filter(|path| !path.as_os_str().is_empty()),
            context: given(&self.context),
            namespace: given(&self.namespace),
            namespaces: self.namespaces.clone(),
            storage_class: given(&self.storage_class),
            runtime_class: given(&self.runtime_class),
            node_selector: self.node_selector.clone(),
            service_account: given(&self.service_account),
            mount_path: self.mount_path.clone(),
            workspace_bytes: self.workspace_bytes,
            claim_templates: self.claim_templates,
            pod: pod.as_object().cloned().unwrap_or_default(),
            driver_config: self.driver_config.clone(),
            agent_volume: self.agent_volume,
            agent_link,
            agent_port: self.agent_port,
            start_timeout: Duration::from_secs(config.boot_timeout_seconds),
            stop_margin: Duration::from_secs(self.stop_margin_seconds),
            compare_every: Duration::from_secs(self.compare_seconds.max(1)),
            ..KubernetesConfig::new(&config.state_dir, &self.agent_image)
        })
    }
}

/// Looks at the cluster that the configuration names: its versions, the gateway's rights, its classes.
pub async fn doctor(config: &Config) -> Vec<Check> {
    let looked = match config.kubernetes.for_driver(config) {
        Ok(driver) => diagnose(&driver).await,
        Err(error) => Err(error),
    };
    let found = match looked {
        Ok(found) => found,
        Err(error) => {
            let advice = "mend [kubernetes] in the configuration file, and give it by --config";
            return vec![Check::fail("cluster", error.to_string(), advice)];
        }
    };
    found.into_iter().map(Check::from).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_section_comes_to_the_driver_as_it_is_written() {
        let text = "[kubernetes]\nnamespace = 'boxes'\nruntime_class = 'kata'\n\
                    driver_config = ['nodeSelector']\nagent_volume = true\n\
                    [kubernetes.namespaces]\nteam = 'team-boxes'\n\
                    [[kubernetes.pod.tolerations]]\nkey = 'sandboxes'\noperator = 'Exists'\n";
        let config: Config = toml::from_str(text).unwrap();
        let driver = config.kubernetes.for_driver(&config).unwrap();
        assert_eq!(
            (driver.namespace.as_deref(), driver.runtime_class.as_deref()),
            (Some("boxes"), Some("kata"))
        );
        assert_eq!((driver.storage_class, driver.kubeconfig), (None, None));
        assert_eq!(driver.namespaces["team"], "team-boxes");
        assert!(driver.driver_config.contains("nodeSelector") && driver.agent_volume);
        assert_eq!(driver.pod["tolerations"][0]["key"], "sandboxes");
        assert!(driver.agent_image.starts_with("torpor-agent:"));
        assert_eq!((driver.agent_link, driver.agent_port), (AgentLink::Exec, 7443));
        let config: Config = toml::from_str("[kubernetes]\nagent_link = 'mtls'\nagent_port = 9000").unwrap();
        let driver = config.kubernetes.for_driver(&config).unwrap();
        assert_eq!((driver.agent_link, driver.agent_port), (AgentLink::Mtls, 9000));
        let config: Config = toml::from_str("[kubernetes]\nagent_link = 'TLS'").unwrap();
        let refused = config.kubernetes.for_driver(&config).unwrap_err().to_string();
        assert!(refused.contains("agent_link") && refused.contains("'TLS'"), "{refused}");
    }
}
