package api

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

// AuthoritySecret is the Secret with the authority of all nodes, certificate and key in one PEM. The controller role
// keeps the Secret in the namespace of its lease. A reader of the Secret can speak as any node.
const (
	AuthoritySecret = "drover-node-authority"
	AuthorityKey    = "authority.pem"
)

// NodeCertificate gets a process of a node the certificate by which other nodes know the process. Spec: written by the
// process, which keeps its key secret. Status: by the controller role alone, which issues and renews.
// Name: <node name>.<first 8 hex digits of the digest of the public key>.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:scope=Cluster,shortName=ncert,categories=drover
// +kubebuilder:printcolumn:name="Node",type=string,JSONPath=`.spec.node`
// +kubebuilder:printcolumn:name="Expires",type=string,JSONPath=`.status.notAfter`
// +kubebuilder:printcolumn:name="Message",type=string,JSONPath=`.status.message`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type NodeCertificate struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`
	Spec              NodeCertificateSpec   `json:"spec"`
	Status            NodeCertificateStatus `json:"status,omitempty"`
}

// NodeCertificateSpec asks for a certificate.
//
// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="a request cannot change: make a new one"
type NodeCertificateSpec struct {
	Node string `json:"node"`
	// Request is a PKCS #10 request (PEM). Only its public key counts.
	// +kubebuilder:validation:MaxLength=8192
	Request string `json:"request"`
}

// NodeCertificateStatus is what was issued.
type NodeCertificateStatus struct {
	Certificate string `json:"certificate,omitempty"` // PEM
	// Authorities (PEM) for checking the certificates of other nodes.
	Authorities string      `json:"authorities,omitempty"`
	NotAfter    metav1.Time `json:"notAfter,omitempty"`
	Message     string      `json:"message,omitempty"` // why there is none
}

// NodeCertificateList is a list of NodeCertificate.
//
// +kubebuilder:object:root=true
type NodeCertificateList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []NodeCertificate `json:"items"`
}
