//! Methods of the interface that are not served, and why.

use crate::error::{ApiError, Code};

const SERVICE: &str = "/openshell.v1.OpenShell/";

/// Reasons, and the methods that they hold for.
const REFUSED: &[(&str, &[&str])] = &[
    (
        "this gateway has no supervisors in its sandboxes: its own agent reports to it by other means",
        &[
            "ConnectSupervisor",
            "RelayStream",
            "PushSandboxLogs",
            "ReportMainProcessExit",
            "FinalizeMainProcessExit",
            "ReportPolicyStatus",
            "ReportEndpointStatus",
            "ReportProviderReadiness",
            "ReportSandboxConfiguration",
            "GetSandboxProviderEnvironment",
        ],
    ),
    (
        "this gateway has no peers",
        &[
            "PeerRelay",
            "PeerReportProviderReadiness",
            "PeerReportEndpointStatus",
            "PeerGetSandboxProviderStatus",
            "PeerNotifyConfigUpdate",
        ],
    ),
    (
        "this gateway keeps policies and understands none: it draws up and checks none either",
        &[
            "GetSandboxPolicyStatus",
            "ListSandboxPolicies",
            "SubmitPolicyAnalysis",
            "GetDraftPolicy",
            "ApproveDraftChunk",
            "RejectDraftChunk",
            "ApproveAllDraftChunks",
            "EditDraftChunk",
            "UndoDraftChunk",
            "ClearDraftChunks",
            "GetDraftHistory",
        ],
    ),
    (
        "this gateway keeps providers and understands none: it has no profiles and refreshes no credential",
        &[
            "ListProviderProfiles",
            "GetProviderProfile",
            "ImportProviderProfiles",
            "UpdateProviderProfiles",
            "LintProviderProfiles",
            "DeleteProviderProfile",
            "GetProviderRefreshStatus",
            "ConfigureProviderRefresh",
            "RotateProviderCredential",
            "DeleteProviderRefresh",
            "GetSandboxProviderStatus",
            "ExchangeProviderSubjectToken",
        ],
    ),
    ("credentials that were given to this gateway never leave it again", &["GetProviderCredentials"]),
    ("images are brought by `torpor image import`, not by clients", &["BeginRootfsTarStaging"]),
    (
        "tokens for sandboxes are made by torpor.v1.Access/CreateToken",
        &["IssueSandboxToken", "RefreshSandboxToken"],
    ),
];

/// Why a method of the interface is not served; none: it is served, or is none of the interface.
pub fn refused(path: &str) -> Option<ApiError> {
    let method = path.strip_prefix(SERVICE)?;
    let (reason, _) = REFUSED.iter().find(|(_, methods)| methods.contains(&method))?;
    Some(ApiError::new(Code::Unimplemented, "NOT_SERVED", format!("{method}: {reason}")))
}

#[cfg(test)]
mod tests {
    use prost::Message as _;

    use super::*;

    #[test]
    fn every_method_that_is_not_served_says_why() {
        let all = prost_types::FileDescriptorSet::decode(torpor_proto::DESCRIPTORS).unwrap();
        let own = all.file.iter().filter(|file| file.package() == "openshell.v1");
        let served: Vec<_> = own.flat_map(|file| &file.service).flat_map(|service| &service.method).collect();
        assert_eq!(served.len(), 42);
        let methods: Vec<_> = REFUSED.iter().flat_map(|(_, methods)| *methods).collect();
        assert_eq!(methods.len(), 42);
        for method in methods {
            let error = refused(&format!("{SERVICE}{method}")).unwrap();
            assert_eq!(error.code, Code::Unimplemented);
            assert!(served.iter().all(|served| served.name() != *method), "{method} is served");
        }
        assert!(refused("/openshell.v1.OpenShell/GetSandbox").is_none());
        assert!(refused("/torpor.v1.Sandboxes/Get").is_none());
    }
}
