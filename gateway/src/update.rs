//! Updates of sandboxes that are there. What can be refused is refused before anything is written; then it is written that
//! the update is pending, the driver does its part, and it is written that it is done. An update that stops on the way stays
//! pending, nothing starts its sandbox meanwhile, and it can be resumed or given up. Wire types are not known here.

use std::{collections::BTreeMap, sync::Arc, time::SystemTime};

use torpor_sandbox::{
    ComputeDriver, DriverError, EgressChange, Field, PendingUpdate, SandboxSpec, SpecChange, UpdateFailure,
    failpoint::hit,
    lifecycle::FINISH_UPDATE,
    spec::{size, validate_annotations, validate_labels},
    words::said_within,
};

use crate::{
    disks::AtRest,
    egress::checked,
    error::{ApiError, Code, with_causes},
    maintenance::Kind,
    service::{Service, Target, place_of, request_key},
    store::{Record, RequestKey, StoreError},
};

/// Longest message of a failure that is kept, characters.
const LONGEST_MESSAGE: usize = 1000;

/// An update as it came in; what is none is left alone.
#[derive(Clone, Debug, Default)]
pub struct UpdateWish {
    /// Another image.
    pub image: Option<String>,
    /// In place of all present ones.
    pub labels: Option<BTreeMap<String, String>>,
    /// In place of all present ones of the user's.
    pub annotations: Option<BTreeMap<String, String>>,
    /// Of the spec.
    pub change: SpecChange,
}

/// Where an update stopped.
struct Stopped {
    step: &'static str,
    error: DriverError,
    /// Whether anything is another than before.
    begun: bool,
}

impl Service {
    fn updates_are_on(&self) -> Result<(), ApiError> {
        if self.updates {
            return Ok(());
        }
        let message = "updates of sandboxes are switched off in this gateway: `enable_sandbox_updates` in its \
                       configuration switches them on";
        let error = ApiError::new(Code::Unimplemented, "UPDATES_DISABLED", message);
        Err(error.with("next", "set enable_sandbox_updates = true in the gateway's configuration"))
    }

    /// Changes a sandbox that is at the version which the caller believes in: labels and annotations in every phase but
    /// Deleting, all else at rest.
    ///
    /// # Errors
    /// `UNIMPLEMENTED` while updates are switched off, for another image, and for what its driver can't change;
    /// `INVALID_ARGUMENT` for a value that can't be, or without a version; `ABORTED` for a stale one; `FAILED_PRECONDITION`
    /// unless it is at rest, and while another update is pending. `UPDATE_PENDING`: it stopped on the way.
    pub async fn update(&self, target: Target, wish: UpdateWish) -> Result<Arc<Record>, ApiError> {
        self.updates_are_on()?;
        let asked = format!("{} {wish:?}", target.sandbox);
        let key = request_key(place_of(&target.sandbox), target.request_id.clone(), "update", &asked)?;
        if let Some(before) = self.first_result(key.as_ref()).await? {
            return before;
        }
        let wish = self.checked_wish(self.without_its_image(&target, wish).await?)?;
        let Some(expected) = target.expected_version else {
            let problem = "the version that the update is meant for is needed (`torpor get` shows it)";
            return Err(ApiError::invalid("target.expected_version", problem));
        };
        let UpdateWish { labels, annotations, change, .. } = wish;
        if change.is_empty() {
            let done = self.store.relabel(target.sandbox, expected, labels, annotations, key).await?;
            return Ok(done.record);
        }
        let rest = match self.at_rest(&target, Kind::Update).await {
            Ok(rest) => rest,
            // The first one may have been at it, and has changed the version.
            Err(error) => return self.first_result(key.as_ref()).await?.unwrap_or(Err(error)),
        };
        let record = &rest.record;
        if record.state.update.is_some() {
            return Err(still_pending(record));
        }
        self.may_become(record, &rest.driver, &change)?;
        hit("update.checked").map_err(StoreError::from)?;
        if change.fields(&record.spec).is_empty() {
            let done =
                self.store.relabel(record.id.to_string(), record.version, labels, annotations, key).await?;
            return Ok(done.record);
        }
        let update = PendingUpdate {
            change,
            labels,
            annotations,
            request: key.as_ref().map(|key| key.id.clone()),
            since: SystemTime::now(),
            failure: None,
        };
        let begun = self.store.begin_update(&record.id, record.version, update, key).await?;
        if begun.replayed {
            return result_of(begun.record);
        }
        hit("update.begun").map_err(StoreError::from)?;
        self.carry_out(AtRest { record: Arc::unwrap_or_clone(begun.record), ..rest }).await
    }

    /// What the same request came to before; none when it is new.
    async fn first_result(
        &self,
        key: Option<&RequestKey>,
    ) -> Result<Option<Result<Arc<Record>, ApiError>>, ApiError> {
        let Some(key) = key else { return Ok(None) };
        let Some(id) = self.store.replayed(key.clone()).await? else { return Ok(None) };
        Ok(Some(result_of(Arc::new(self.store.get(&id).await?))))
    }

    /// Does what a pending update has not done yet; with `abandon` gives that up instead. A sandbox without one stays as it
    /// is.
    ///
    /// # Errors
    /// As [`Service::update`].
    pub async fn resume_update(&self, target: Target, abandon: bool) -> Result<Arc<Record>, ApiError> {
        let record = self.store.get(&target.sandbox).await?;
        // One that was begun while they were on is finished or given up whatever the switch says now: it bars the start.
        if record.state.update.is_none() {
            self.updates_are_on()?;
        }
        if record.state.update.is_none() && target.expected_version.is_none_or(|v| v == record.version) {
            return Ok(Arc::new(record));
        }
        let rest = self.at_rest(&target, Kind::Update).await?;
        if rest.record.state.update.is_none() {
            return Ok(Arc::new(rest.record));
        }
        if !abandon {
            return self.carry_out(rest).await;
        }
        let abandoned = self.store.abandon_update(&rest.record.id).await?;
        self.carry_out(AtRest { record: Arc::unwrap_or_clone(abandoned.record), ..rest }).await
    }

    /// The image that it has is no change.
    async fn without_its_image(&self, target: &Target, mut wish: UpdateWish) -> Result<UpdateWish, ApiError> {
        if let Some(image) = &wish.image {
            let spec = &self.store.get(&target.sandbox).await?.spec;
            if [&spec.image, &spec.image_digest].contains(&image) {
                wish.image = None;
            }
        }
        Ok(wish)
    }

    /// What can be said of an update without its sandbox.
    fn checked_wish(&self, mut wish: UpdateWish) -> Result<UpdateWish, ApiError> {
        if wish.image.is_some() {
            let message = "image: the disk of a sandbox holds what is another than in its image, block by block; over \
                           another image it would be no file system any more, so no driver of this gateway can change it";
            let error = ApiError::new(Code::Unimplemented, "IMAGE_UPDATE_NOT_SUPPORTED", message);
            let next =
                "make a sandbox of the new image (torpor create --image) and copy over what is to stay";
            return Err(error.with("field", "image").with("next", next));
        }
        wish.labels.as_ref().map_or(Ok(()), validate_labels)?;
        wish.annotations.as_ref().map_or(Ok(()), validate_annotations)?;
        if let Some(EgressChange::Own(egress)) = wish.change.egress {
            let own = checked(Some(egress))?.map(EgressChange::Own);
            wish.change.egress = own.or(Some(EgressChange::Default));
        }
        Ok(wish)
    }

    /// Refuses a spec that can't be, or not of this one.
    fn may_become(
        &self,
        record: &Record,
        driver: &Arc<dyn ComputeDriver>,
        change: &SpecChange,
    ) -> Result<(), ApiError> {
        let (mut spec, present) = (record.spec.clone(), record.spec.resources.disk_bytes);
        change.apply(&mut spec);
        let known = driver.updates();
        if let Some(field) = change.fields(&record.spec).into_iter().find(|field| !known.contains(field)) {
            let possible = match known {
                [] => "only labels and annotations can be changed".to_owned(),
                fields => format!("it can change {}", names(fields)),
            };
            let why = driver.why_not(field).map(|why| format!(": {why}")).unwrap_or_default();
            let message = format!(
                "{}: the {} driver can't change it of a sandbox that is there{why}; {possible}",
                field.as_str(),
                record.spec.driver
            );
            let error = ApiError::new(Code::Unimplemented, "UPDATE_NOT_SUPPORTED", message);
            let next = "make a sandbox that has it so (torpor create), and copy over what is to stay";
            return Err(error.about(record).with("field", field.as_str()).with("next", next));
        }
        self.could_run(&spec, driver)?;
        if spec.resources.disk_bytes < present {
            let problem = format!(
                "{} asked for; the disk has {} and never shrinks",
                size(spec.resources.disk_bytes),
                size(present)
            );
            return Err(ApiError::invalid("resources.disk_bytes", problem).about(record));
        }
        Ok(())
    }

    /// Does what is pending. Each step may be done already.
    async fn carry_out(&self, rest: AtRest) -> Result<Arc<Record>, ApiError> {
        let AtRest { record, driver, guard } = rest;
        let done = match apply(&record, &driver).await {
            Ok(disk_bytes) => {
                let ended = async {
                    hit("update.applied").map_err(StoreError::from)?;
                    self.store.end_update(&record.id, disk_bytes).await
                };
                let ended = ended.await.map(|applied| applied.record);
                // Only a place to end at: what is written is written.
                let _ = hit("update.ended");
                // The driver was told of the spec as it was at the beginning: another policy may have been written since.
                if let Err(error) = self.in_force.see_to(&*driver, &record.id).await {
                    tracing::warn!(id = %record.id, %error, "its egress policy is not noted; its start does that");
                }
                ended.map_err(|error| pending(&record, "write the record", &error.into()))
            }
            Err(stopped) => Err(self.stopped(&record, stopped).await),
        };
        drop(guard);
        done
    }

    async fn stopped(&self, record: &Record, stopped: Stopped) -> ApiError {
        let Stopped { step, error, begun } = stopped;
        if matches!(error, DriverError::NoSpace(_)) {
            self.pressure.note_failure();
        }
        let said = said_within(&with_causes(&error), LONGEST_MESSAGE);
        let cause = ApiError::new(Code::of_driver(&error), error.reason(), said.clone());
        // What can never be done, and has not been begun, leaves nothing behind.
        if !begun && matches!(error, DriverError::Invalid(_) | DriverError::Unsupported(_)) {
            return match self.store.drop_update(&record.id).await {
                Ok(_) => {
                    let message = format!("sandbox '{}': {step}: {said}; nothing was changed", record.name);
                    ApiError { message, ..cause }
                        .about(record)
                        .with("next", format!("torpor get {}", record.name))
                }
                Err(error) => pending(record, step, &error.into()),
            };
        }
        let reason = error.reason().to_owned();
        let failure = UpdateFailure { step: step.to_owned(), reason, message: said };
        if let Err(error) = self.store.note_update(&record.id, failure).await {
            // It is pending all the same, without its reason.
            tracing::error!(id = %record.id, %error, "why an update stopped can't be written");
        }
        pending(record, step, &cause)
    }
}

/// Has the driver do what is pending of `record`; the size of its disk then.
async fn apply(record: &Record, driver: &Arc<dyn ComputeDriver>) -> Result<u64, Stopped> {
    let mut spec = record.spec.clone();
    let present = spec.resources.disk_bytes;
    if let Some(update) = &record.state.update {
        update.change.apply(&mut spec);
    }
    let wanted = spec.resources.disk_bytes;
    let mut begun = false;
    spec.resources.disk_bytes = present;
    if wanted > present {
        let stopped = |error| Stopped { step: "grow the disk", error, begun: false };
        hit("update.grow").map_err(DriverError::from).map_err(stopped)?;
        let disks = driver.disks().ok_or_else(|| {
            let text = format!("the {} driver has no disks to grow", record.spec.driver);
            stopped(DriverError::Unsupported(text))
        })?;
        spec.resources.disk_bytes = disks.grow(&record.id, wanted).await.map_err(stopped)?;
        begun = true;
    }
    let stopped = |error| Stopped { step: "change the driver's own record", error, begun };
    hit("update.apply").map_err(DriverError::from).map_err(stopped)?;
    driver.update(&record.id, &spec).await.map_err(stopped)?;
    Ok(spec.resources.disk_bytes)
}

/// What a request has come to that left this record.
fn result_of(record: Arc<Record>) -> Result<Arc<Record>, ApiError> {
    if record.state.update.is_some() { Err(still_pending(&record)) } else { Ok(record) }
}

fn finish_command(record: &Record) -> String {
    format!("torpor {FINISH_UPDATE} {}", record.name)
}

/// It stopped on the way, just now.
fn pending(record: &Record, step: &str, cause: &ApiError) -> ApiError {
    let message = format!(
        "sandbox '{}': the update stopped at '{step}': {cause}; it is pending, and start and resume wait for it",
        record.name
    );
    // A repeat of the same request does not help, and must not look so.
    let code = if cause.code == Code::Unavailable { Code::Internal } else { cause.code };
    ApiError::new(code, "UPDATE_PENDING", message)
        .about(record)
        .with("step", step)
        .with("cause", cause.reason.clone())
        .with("next", finish_command(record))
}

/// It stopped on the way, before.
fn still_pending(record: &Record) -> ApiError {
    let failure = record.state.update.as_ref().and_then(|update| update.failure.as_ref());
    let message = match failure {
        Some(failure) => format!(
            "sandbox '{}': an update is pending: it stopped at '{}': {}",
            record.name, failure.step, failure.message
        ),
        None => format!("sandbox '{}': an update is pending", record.name),
    };
    let error = ApiError::new(Code::FailedPrecondition, "UPDATE_PENDING", message).about(record);
    error.with("next", finish_command(record))
}

/// The condition of a sandbox with this spec and a pending update: its reason and what is said of it.
pub fn condition<'a>(spec: &SandboxSpec, update: &'a PendingUpdate, under_way: bool) -> (&'a str, String) {
    let fields = || match update.change.fields(spec).as_slice() {
        [] => "the record".to_owned(),
        fields => names(fields),
    };
    match &update.failure {
        _ if under_way => ("IN_PROGRESS", format!("changes {}", fields())),
        Some(failure) => (&failure.reason, format!("{}: {}", failure.step, failure.message)),
        None => ("INTERRUPTED", format!("the gateway ended while it changed {}", fields())),
    }
}

fn names(fields: &[Field]) -> String {
    fields.iter().map(|field| field.as_str()).collect::<Vec<_>>().join(", ")
}
