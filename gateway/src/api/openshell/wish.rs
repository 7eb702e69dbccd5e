//! What a client of `openshell.v1` wishes for, in our words.

use prost_types::{Struct, Value, value::Kind};
use torpor_proto::{openshell::v1 as os, v1};
use torpor_sandbox::id::clip;

use crate::error::{ApiError, Code};

/// A sandbox as it is to be created.
///
/// # Errors
/// `INVALID_ARGUMENT`, `FAILED_PRECONDITION` for a GPU, `UNIMPLEMENTED` for what would have to be left out.
pub fn spec(from: &os::SandboxSpec) -> Result<v1::SandboxSpec, ApiError> {
    let template = from.template.clone().unwrap_or_default();
    if from.resource_requirements.as_ref().is_some_and(|wanted| wanted.gpu.is_some()) {
        return Err(no_gpu("spec.resource_requirements.gpu"));
    }
    if template.user_namespaces == Some(true) {
        let message = "spec.template.user_namespaces: no driver of this gateway is told of them here";
        let error = ApiError::new(Code::Unimplemented, "NOT_SERVED", message);
        return Err(error.with("field", "spec.template.user_namespaces").with("next", "leave it out"));
    }
    let restart_policy = match os::SandboxRestartPolicy::try_from(from.restart_policy) {
        Ok(os::SandboxRestartPolicy::Unspecified) => v1::RestartPolicy::Unspecified,
        Ok(os::SandboxRestartPolicy::Never) => v1::RestartPolicy::Never,
        Ok(os::SandboxRestartPolicy::OnFailure) => v1::RestartPolicy::OnFailure,
        Ok(os::SandboxRestartPolicy::Always) => v1::RestartPolicy::Always,
        Err(_) => {
            let problem = format!("{} is not known", from.restart_policy);
            return Err(ApiError::invalid("spec.restart_policy", problem));
        }
    };
    let mut environment = template.environment;
    environment.extend(from.environment.clone());
    let mut spec = v1::SandboxSpec {
        image: template.image,
        command: from.command.clone(),
        environment: environment.into_iter().collect(),
        resources: resources(template.resources.as_ref())?,
        restart_policy: restart_policy.into(),
        // It is the main command's.
        tty: from.tty && !from.command.is_empty(),
        ..v1::SandboxSpec::default()
    };
    driver_config(template.driver_config.as_ref(), &mut spec)?;
    Ok(spec)
}

/// The driver whose sandboxes have runtime classes.
pub const WITH_CLASSES: &str = "kubernetes";

/// A class of the cluster that pods run by: the kubernetes driver is told of it. A sandbox of another driver would run
/// without what was asked for.
///
/// # Errors
/// `UNIMPLEMENTED` for another driver.
pub fn runtime_class(class: &str, default_driver: &str, spec: &mut v1::SandboxSpec) -> Result<(), ApiError> {
    let driver = if spec.driver.is_empty() { default_driver } else { &spec.driver };
    if class.is_empty() {
        return Ok(());
    }
    if driver != WITH_CLASSES {
        let field = "spec.template.runtime_class_name";
        let message = format!("{field}: the {driver} driver has no runtime classes");
        let error = ApiError::new(Code::Unimplemented, "NOT_SERVED", message).with("field", field);
        return Err(
            error.with("next", "leave it out, or choose a driver: template.driver_config.torpor.driver")
        );
    }
    let class = Value { kind: Some(Kind::StringValue(class.to_owned())) };
    let config = spec.driver_config.get_or_insert_default();
    let kept = config.fields.entry("runtimeClassName".to_owned()).or_insert_with(|| class.clone());
    if *kept != class {
        let problem = "template.driver_config.torpor.config.runtimeClassName says another one";
        return Err(ApiError::invalid("spec.template.runtime_class_name", problem));
    }
    Ok(())
}

/// What drivers of ours are told: what stands under "torpor".
fn driver_config(config: Option<&Struct>, spec: &mut v1::SandboxSpec) -> Result<(), ApiError> {
    let Some(ours) = config.and_then(|config| field(config, "torpor")) else { return Ok(()) };
    for (key, value) in &ours.fields {
        let field = format!("driver_config.torpor.{key}");
        if key == "config" {
            let Some(Kind::StructValue(config)) = &value.kind else {
                return Err(ApiError::invalid(&field, "an object is needed"));
            };
            spec.driver_config = Some(config.clone());
            continue;
        }
        let Some(Kind::StringValue(text)) = &value.kind else {
            return Err(ApiError::invalid(&field, "text is needed"));
        };
        match key.as_str() {
            "driver" => spec.driver.clone_from(text),
            "machine" => spec.machine.clone_from(text),
            "kernel" => spec.kernel.clone_from(text),
            "user" => spec.user.clone_from(text),
            "workdir" => spec.workdir.clone_from(text),
            "disk" => {
                let bytes = memory(text).ok_or_else(|| not_a_size(&field, text))?;
                spec.resources.get_or_insert_default().disk_bytes = Some(bytes);
            }
            _ => {
                let known = "driver, machine, kernel, user, workdir, disk and config are known";
                return Err(ApiError::invalid(&field, known));
            }
        }
    }
    Ok(())
}

/// A GPU was asked for.
pub fn no_gpu(field: &str) -> ApiError {
    let message = format!("{field}: no driver of this gateway has GPUs");
    ApiError::new(Code::FailedPrecondition, "GPU_NOT_SUPPORTED", message).with("field", field)
}

fn field<'a>(of: &'a Struct, key: &str) -> Option<&'a Struct> {
    match &of.fields.get(key)?.kind {
        Some(Kind::StructValue(inner)) => Some(inner),
        _ => None,
    }
}

/// CPUs and memory of a template, as Kubernetes writes them: limits, else requests, else at the top.
fn resources(from: Option<&Struct>) -> Result<Option<v1::Resources>, ApiError> {
    let Some(from) = from else { return Ok(None) };
    let places = [field(from, "limits"), field(from, "requests"), Some(from)];
    for (key, value) in places.iter().flatten().flat_map(|place| &place.fields) {
        known_resource(key, value)?;
    }
    let found = |key: &str| places.iter().flatten().find_map(|place| place.fields.get(key)).map(written);
    sizes(found("cpu"), found("memory"), "spec.template.resources")
}

/// Refuses what would be left out.
fn known_resource(key: &str, value: &Value) -> Result<(), ApiError> {
    let nothing = match &value.kind {
        None | Some(Kind::NullValue(_)) => true,
        Some(Kind::StructValue(inner)) => ["limits", "requests"].contains(&key) || inner.fields.is_empty(),
        _ => ["0", ""].contains(&written(value).as_str()),
    };
    if nothing || ["cpu", "memory"].contains(&key) {
        return Ok(());
    }
    let shown = format!("spec.template.resources.{}", clip(key).escape_debug());
    if key.to_ascii_lowercase().contains("gpu") {
        return Err(no_gpu(&shown));
    }
    let disk = "cpu and memory are known; a disk's size is template.driver_config.torpor.disk";
    Err(ApiError::invalid(&shown, disk))
}

/// A quantity is text or a number.
fn written(value: &Value) -> String {
    match &value.kind {
        Some(Kind::StringValue(text)) => text.clone(),
        Some(Kind::NumberValue(number)) => number.to_string(),
        other => format!("{other:?}"),
    }
}

/// CPUs and memory as quantities; none or empty: the gateway's default.
///
/// # Errors
/// `INVALID_ARGUMENT`.
pub fn sizes(
    cpu: Option<String>,
    memory_text: Option<String>,
    place: &str,
) -> Result<Option<v1::Resources>, ApiError> {
    let given = |text: Option<String>| text.filter(|text| !text.is_empty());
    let (cpu, text) = (given(cpu), given(memory_text));
    if cpu.is_none() && text.is_none() {
        return Ok(None);
    }
    let cpus = cpu.map(|text| {
        let problem = || {
            let shown = text.escape_debug();
            ApiError::invalid(
                &format!("{place}.cpu"),
                format!("'{shown}' is no number of CPUs, as in \"2\" or \"500m\""),
            )
        };
        cpus(&text).ok_or_else(problem)
    });
    let memory_bytes =
        text.map(|text| memory(&text).ok_or_else(|| not_a_size(&format!("{place}.memory"), &text)));
    Ok(Some(v1::Resources {
        cpus: cpus.transpose()?,
        memory_bytes: memory_bytes.transpose()?,
        disk_bytes: None,
    }))
}

fn not_a_size(field: &str, text: &str) -> ApiError {
    ApiError::invalid(field, format!("'{}' is no size, as in \"512Mi\" or \"4Gi\"", text.escape_debug()))
}

/// Whole virtual CPUs: a part of one counts as one.
fn cpus(text: &str) -> Option<u32> {
    let cores = match text.strip_suffix('m') {
        Some(thousandths) => f64::from(thousandths.parse::<u32>().ok()?) / 1000.0,
        None => text.parse::<f64>().ok()?,
    };
    // Far above what any sandbox may have.
    (cores > 0.0 && cores <= 4096.0).then(|| cores.ceil() as u32)
}

/// Bytes.
fn memory(text: &str) -> Option<u64> {
    const UNITS: [(&str, u64); 10] = [
        ("Ki", 1 << 10),
        ("Mi", 1 << 20),
        ("Gi", 1 << 30),
        ("Ti", 1 << 40),
        ("k", 1000),
        ("K", 1000),
        ("M", 1_000_000),
        ("G", 1_000_000_000),
        ("T", 1_000_000_000_000),
        ("", 1),
    ];
    let (number, unit) = UNITS.iter().find_map(|(name, unit)| Some((text.strip_suffix(name)?, *unit)))?;
    if let Ok(whole) = number.parse::<u64>() {
        return whole.checked_mul(unit);
    }
    let part = number.parse::<f64>().ok()?;
    let bytes = part * unit as f64;
    (bytes >= 1.0 && bytes < (1_u64 << 53) as f64).then_some(bytes as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_are_read_as_kubernetes_writes_them() {
        for (text, wanted) in [("2", 2), ("500m", 1), ("1500m", 2), ("0.5", 1), ("3.0", 3)] {
            assert_eq!(cpus(text), Some(wanted), "{text}");
        }
        for text in ["", "0", "-1", "m", "x", "1e9", "nan"] {
            assert_eq!(cpus(text), None, "{text}");
        }
        for (text, wanted) in
            [("512Mi", 512 << 20), ("1.5Gi", 3 << 29), ("1000", 1000), ("2G", 2_000_000_000), ("4k", 4000)]
        {
            assert_eq!(memory(text), Some(wanted), "{text}");
        }
        for text in ["", "Mi", "-1Gi", "1Xi", "99999999999Ti", "infGi", "nan"] {
            assert_eq!(memory(text), None, "{text}");
        }
    }

    #[test]
    fn a_gpu_is_refused_before_anything_is_written() {
        let gpu = os::ResourceRequirements { gpu: Some(os::GpuResourceRequirements { count: Some(1) }) };
        let wanted = os::SandboxSpec { resource_requirements: Some(gpu), ..os::SandboxSpec::default() };
        assert_eq!(spec(&wanted).unwrap_err().code, Code::FailedPrecondition);
    }

    fn quantities(of: &[(&str, &str)]) -> Value {
        let text = |text: &str| Value { kind: Some(Kind::StringValue(text.to_owned())) };
        let fields = of.iter().map(|(key, value)| ((*key).to_owned(), text(value))).collect();
        Value { kind: Some(Kind::StructValue(Struct { fields })) }
    }

    #[test]
    fn nothing_that_is_asked_for_is_left_out_silently() {
        let of = |template| spec(&os::SandboxSpec { template: Some(template), ..os::SandboxSpec::default() });
        let asked = |key: &str, value: &str| {
            let fields = [("limits".to_owned(), quantities(&[(key, value), ("cpu", "2")]))].into();
            of(os::SandboxTemplate { resources: Some(Struct { fields }), ..os::SandboxTemplate::default() })
        };
        assert_eq!(asked("nvidia.com/gpu", "1").unwrap_err().reason, "GPU_NOT_SUPPORTED");
        let error = asked("ephemeral-storage", "1Gi").unwrap_err();
        assert!(error.message.contains("ephemeral-storage"), "{error}");
        for (key, value) in [("nvidia.com/gpu", "0"), ("memory", "1Gi")] {
            assert_eq!(asked(key, value).unwrap().resources.unwrap().cpus, Some(2), "{key}");
        }
        let namespaces = |user_namespaces| os::SandboxTemplate { user_namespaces, ..Default::default() };
        assert_eq!(of(namespaces(Some(true))).unwrap_err().code, Code::Unimplemented);
        assert!(of(namespaces(Some(false))).is_ok());
    }

    #[test]
    fn a_runtime_class_is_kubernetes_or_refused() {
        let class = |driver: &str, default: &str| {
            let mut spec = v1::SandboxSpec { driver: driver.to_owned(), ..Default::default() };
            runtime_class("kata", default, &mut spec).map(|()| spec.driver_config.unwrap().fields)
        };
        for (driver, default) in [("kubernetes", "vm"), ("", "kubernetes")] {
            let kata = Value { kind: Some(Kind::StringValue("kata".into())) };
            assert_eq!(class(driver, default).unwrap()["runtimeClassName"], kata);
        }
        assert_eq!(class("vm", "kubernetes").unwrap_err().code, Code::Unimplemented);
        assert_eq!(class("", "vm").unwrap_err().code, Code::Unimplemented);
        assert!(runtime_class("", "vm", &mut v1::SandboxSpec::default()).is_ok());
    }

    #[test]
    fn a_terminal_is_the_main_command_s() {
        let with = |command: &[&str]| {
            let command = command.iter().map(|word| (*word).to_owned()).collect();
            spec(&os::SandboxSpec { command, tty: true, ..os::SandboxSpec::default() }).unwrap().tty
        };
        assert!(with(&["sh"]) && !with(&[]));
    }
}
