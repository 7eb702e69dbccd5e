//! Templates: what they may say, and how a create is filled in from one. Wire types are not known here.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    time::Duration,
};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use torpor_sandbox::{
    Egress, Endpoint, Resources, RestartPolicy, SandboxName, SandboxSpec, Volume,
    spec::{DEFAULT_WORKSPACE, validate_annotations, validate_labels},
};

use crate::{
    egress::checked,
    error::ApiError,
    service::{Service, Wish, request_key},
    store::{StoreError, Template, TemplateKey},
};

/// The annotation of a sandbox that says of which template it was made.
pub const TEMPLATE: &str = "torpor.dev/template";
/// The one that says which version of it.
pub const TEMPLATE_VERSION: &str = "torpor.dev/template-version";

/// What a template says of a sandbox. What is none is said by the create, or by nobody.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct TemplateSpec {
    /// Name or digest.
    pub image: Option<String>,
    /// Main command; empty: not said.
    pub command: Vec<String>,
    /// Its environment.
    pub environment: BTreeMap<String, String>,
    /// Its folder.
    pub workdir: Option<String>,
    /// Its user.
    pub user: Option<String>,
    /// It has an input.
    pub stdin: bool,
    /// It has a terminal.
    pub tty: bool,
    /// Virtual CPUs.
    pub cpus: Option<u32>,
    /// Bytes.
    pub memory_bytes: Option<u64>,
    /// Bytes.
    pub disk_bytes: Option<u64>,
    /// At its end.
    pub restart: Option<RestartPolicy>,
    /// Which backend.
    pub driver: Option<String>,
    /// Which machine of the vm driver.
    pub machine: Option<String>,
    /// A kernel file.
    pub kernel: Option<String>,
    /// For its processes to end.
    pub stop_grace: Option<Duration>,
    /// Where it may send to.
    pub egress: Option<Egress>,
    /// What it mounts of the host; empty: not said.
    pub volumes: Vec<Volume>,
    /// Servers that are looked at; empty: not said.
    pub endpoints: Vec<Endpoint>,
    /// What its driver is told in the driver's own words.
    #[serde(skip_serializing_if = "Map::is_empty")]
    pub driver_config: Map<String, Value>,
}

/// A change of a template; what is none is left alone.
#[derive(Clone, Debug, Default)]
pub struct TemplateChange {
    /// In place of all.
    pub labels: Option<BTreeMap<String, String>>,
    /// In place of all.
    pub annotations: Option<BTreeMap<String, String>>,
    /// In place of the whole one.
    pub spec: Option<TemplateSpec>,
}

impl TemplateSpec {
    /// Says what `wish` leaves out.
    pub(crate) fn fill(self, wish: &mut Wish) {
        fn or<T>(wish: &mut Option<T>, template: Option<T>) {
            if wish.is_none() {
                *wish = template;
            }
        }
        fn or_list<T>(wish: &mut Vec<T>, template: Vec<T>) {
            if wish.is_empty() {
                *wish = template;
            }
        }
        or(&mut wish.image, self.image);
        or_list(&mut wish.command, self.command);
        merge(&mut wish.environment, self.environment);
        or(&mut wish.workdir, self.workdir);
        or(&mut wish.user, self.user);
        wish.stdin |= self.stdin;
        wish.tty |= self.tty;
        or(&mut wish.cpus, self.cpus);
        or(&mut wish.memory_bytes, self.memory_bytes);
        or(&mut wish.disk_bytes, self.disk_bytes);
        or(&mut wish.restart, self.restart);
        or(&mut wish.driver, self.driver);
        or(&mut wish.machine, self.machine);
        or(&mut wish.kernel, self.kernel);
        or(&mut wish.stop_grace, self.stop_grace);
        or(&mut wish.egress, self.egress);
        or_list(&mut wish.volumes, self.volumes);
        or_list(&mut wish.endpoints, self.endpoints);
        for (key, value) in self.driver_config {
            // The keys of both, as of every map; `serde_json::Map` has an entry of its own.
            wish.driver_config.entry(key).or_insert(value);
        }
    }

    /// What it would be with nothing else said, for a check of its fields.
    fn completed(&self, service: &Service) -> SandboxSpec {
        let defaults = &service.defaults;
        let this = self.clone();
        SandboxSpec {
            driver: this.driver.unwrap_or_else(|| service.drivers.default_name().to_owned()),
            workspace: DEFAULT_WORKSPACE.to_owned(),
            hostname: String::new(),
            image: this.image.unwrap_or_else(|| defaults.image.clone()),
            image_digest: String::new(),
            command: this.command,
            environment: this.environment,
            workdir: this.workdir,
            user: this.user,
            stdin: this.stdin,
            tty: this.tty,
            resources: Resources {
                cpus: this.cpus.unwrap_or(defaults.cpus),
                memory_bytes: this.memory_bytes.unwrap_or(defaults.memory_bytes),
                disk_bytes: this.disk_bytes.unwrap_or(defaults.disk_bytes),
            },
            restart: this.restart.unwrap_or_default(),
            stop_grace: this.stop_grace.unwrap_or_default(),
            machine: this.machine.unwrap_or_else(|| "auto".to_owned()),
            kernel: this.kernel,
            egress: this.egress,
            volumes: this.volumes,
            endpoints: this.endpoints,
            driver_config: this.driver_config,
        }
    }
}

/// The keys of both, and the values of `wish` where it has one.
fn merge(wish: &mut BTreeMap<String, String>, template: BTreeMap<String, String>) {
    for (key, value) in template {
        if let Entry::Vacant(free) = wish.entry(key) {
            free.insert(value);
        }
    }
}

impl Service {
    /// Makes a template.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` names the field that can't be; `ALREADY_EXISTS`; `NOT_FOUND` for the workspace.
    pub async fn create_template(
        &self,
        key: TemplateKey,
        change: TemplateChange,
        request_id: Option<String>,
    ) -> Result<Template, ApiError> {
        let request =
            request_key(&key.workspace, request_id, "template create", &format!("{key:?} {change:?}"))?;
        key.name.parse::<SandboxName>().map_err(|error| ApiError::invalid("name", error))?;
        let TemplateChange { labels, annotations, spec } = self.checked_template(change)?;
        let [labels, annotations] = [labels, annotations].map(Option::unwrap_or_default);
        let spec = spec.unwrap_or_default();
        Ok(self.store.create_template(key, labels, annotations, spec, request).await?)
    }

    /// Changes a template that is at the version which the caller believes in.
    ///
    /// # Errors
    /// `NOT_FOUND`, `ABORTED` for a stale version, `INVALID_ARGUMENT` for a field that can't be or without a version.
    pub async fn update_template(
        &self,
        key: TemplateKey,
        expected: Option<u64>,
        change: TemplateChange,
        request_id: Option<String>,
    ) -> Result<Template, ApiError> {
        let request =
            request_key(&key.workspace, request_id, "template update", &format!("{key:?} {change:?}"))?;
        let change = self.checked_template(change)?;
        let Some(expected) = expected else {
            let problem =
                "the version that the update is meant for is needed (`torpor template get` shows it)";
            return Err(ApiError::invalid("expected_version", problem));
        };
        let apply = |template: &mut Template| {
            let TemplateChange { labels, annotations, spec } = change;
            template.labels = labels.unwrap_or(std::mem::take(&mut template.labels));
            template.annotations = annotations.unwrap_or(std::mem::take(&mut template.annotations));
            template.spec = spec.unwrap_or(std::mem::take(&mut template.spec));
        };
        Ok(self.store.update_template(key, expected, apply, request).await?)
    }

    /// Removes a template; sandboxes that were made of it stay. True: it was there.
    ///
    /// # Errors
    /// `NOT_FOUND` unless `allow_missing`; `ABORTED` for a stale version.
    pub async fn delete_template(
        &self,
        key: TemplateKey,
        expected: Option<u64>,
        allow_missing: bool,
    ) -> Result<bool, ApiError> {
        let removed = self.store.delete_template(key.clone(), expected).await?;
        if removed || allow_missing {
            return Ok(removed);
        }
        Err(StoreError::NoTemplate(key.to_string()).into())
    }

    /// Fills in a create from the template that it names; provenance goes into its annotations.
    ///
    /// # Errors
    /// `NOT_FOUND`; `INVALID_ARGUMENT` for more labels or annotations than there may be.
    pub(crate) async fn fill_in(&self, wish: &mut Wish) -> Result<(), ApiError> {
        let Some(name) = wish.template.take() else { return Ok(()) };
        let workspace = wish.workspace.clone().unwrap_or_else(|| DEFAULT_WORKSPACE.to_owned());
        let template = self.store.template(TemplateKey { workspace, name }).await?;
        merge(&mut wish.labels, template.labels);
        merge(&mut wish.annotations, template.annotations);
        // Together they may be too many.
        validate_labels(&wish.labels)?;
        validate_annotations(&wish.annotations)?;
        wish.annotations.insert(TEMPLATE.to_owned(), template.name);
        wish.annotations.insert(TEMPLATE_VERSION.to_owned(), template.version.to_string());
        template.spec.fill(wish);
        Ok(())
    }

    /// What a template says must be possible here and now; images are looked up when a sandbox is made.
    fn checked_template(&self, mut change: TemplateChange) -> Result<TemplateChange, ApiError> {
        change.labels.as_ref().map_or(Ok(()), validate_labels)?;
        change.annotations.as_ref().map_or(Ok(()), validate_annotations)?;
        let Some(spec) = &mut change.spec else { return Ok(change) };
        spec.egress = checked(spec.egress.take())?;
        let completed = spec.completed(self);
        self.could_run(&completed, &self.driver(&completed.driver)?)?;
        if spec.disk_bytes == Some(0) {
            return Err(ApiError::invalid("resources.disk_bytes", "at least one byte is needed"));
        }
        Ok(change)
    }
}
