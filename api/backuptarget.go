package api

import (
	"cmp"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
)

// DefaultBackupTarget is the name of the target of backups that name no other.
const DefaultBackupTarget = "default"

// ParameterBackupTarget is the key, among the parameters of a volume, for the target of the volume's backups.
const ParameterBackupTarget = "backupTargetName"

// CanNameTarget reports whether a BackupTarget can have the name.
func CanNameTarget(name string) bool {
	return len(name) <= 63 && len(validation.IsDNS1123Subdomain(name)) == 0
}

// BackupTarget is the target of backups of the volume that name none.
func (v *Volume) BackupTarget() string {
	return cmp.Or(v.Spec.Parameters[ParameterBackupTarget], DefaultBackupTarget)
}

// BackupTarget is a repository of backups in a store. Status: by the node role of the node that looks after the target,
// which is one of the nodes with a recent heartbeat; two nodes may take turns, and other nodes add the blobs that they
// healed, so each change of the status is a compare-and-swap. Finalizer: none, because the store outlives the object.
//
// +kubebuilder:object:root=true
// +kubebuilder:validation:XValidation:rule="self.metadata.name.size() <= 63",message="the name of a backup target has at most 63 characters"
// +kubebuilder:subresource:status
// +kubebuilder:resource:scope=Cluster,shortName=bt,categories=drover
// +kubebuilder:printcolumn:name="URL",type=string,JSONPath=`.spec.backupTargetURL`
// +kubebuilder:printcolumn:name="Available",type=boolean,JSONPath=`.status.available`
// +kubebuilder:printcolumn:name="Encrypted",type=boolean,JSONPath=`.status.encrypted`
// +kubebuilder:printcolumn:name="Backups",type=integer,JSONPath=`.status.backups`
// +kubebuilder:printcolumn:name="Unlisted",type=integer,JSONPath=`.status.unlisted`
// +kubebuilder:printcolumn:name="Used",type=string,JSONPath=`.status.usage.usedText`
// +kubebuilder:printcolumn:name="Node",type=string,JSONPath=`.status.ownerID`
// +kubebuilder:printcolumn:name="Synced",type=date,JSONPath=`.status.lastSyncedAt`
// +kubebuilder:printcolumn:name="Message",type=string,JSONPath=`.status.message`,priority=1
type BackupTarget struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`
	Spec              BackupTargetSpec   `json:"spec"`
	Status            BackupTargetStatus `json:"status,omitempty"`
}

// BackupTargetSpec is the wish.
type BackupTargetSpec struct {
	// BackupTargetURL says where the store is, in a form of TargetURLs.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=1024
	BackupTargetURL string `json:"backupTargetURL"`
	// CredentialSecret names the Secret with the credentials of the store and the password of the repository.
	CredentialSecret *SecretRef `json:"credentialSecret,omitempty"`
	// PollInterval is how often the backups in the store are listed; 0s: only when SyncRequestedAt changes.
	// +kubebuilder:default="5m0s"
	PollInterval *metav1.Duration `json:"pollInterval,omitempty"`
	// SyncRequestedAt asks, once for each new value, for a list of the backups in the store.
	SyncRequestedAt *metav1.Time `json:"syncRequestedAt,omitempty"`
	// ReadOnly refuses new backups, deletions, sweeps and verifications; a store of Longhorn is verified nevertheless.
	ReadOnly bool `json:"readOnly,omitempty"`
	// MaxUploadRate bounds what each node sends to the store, in bytes per second; 0: no bound.
	// +kubebuilder:validation:Minimum=0
	MaxUploadRate int64 `json:"maxUploadRate,omitempty"`
	// MaxDownloadRate bounds what each node reads from the store, in bytes per second; 0: no bound.
	// +kubebuilder:validation:Minimum=0
	MaxDownloadRate int64 `json:"maxDownloadRate,omitempty"`
	// SweepThreshold is the percentage of a pack's bytes in use below which a sweep copies the rest of the pack elsewhere
	// and deletes the pack. A higher one frees more space, and reads and writes more.
	// +kubebuilder:default=60
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=100
	SweepThreshold int32 `json:"sweepThreshold,omitempty"`
	// VerifyInterval is the time in which the whole repository is read and compared once, in small parts; 0s: only when
	// VerifyRequestedAt changes.
	// +kubebuilder:default="720h0m0s"
	VerifyInterval *metav1.Duration `json:"verifyInterval,omitempty"`
	// VerifyRequestedAt asks, once for each new value, for a verification of the whole repository now.
	VerifyRequestedAt *metav1.Time `json:"verifyRequestedAt,omitempty"`
	// LocksRequest asks, once for each new time, for a list of the locks of the repository in status.locks.
	LocksRequest *LocksRequest `json:"locksRequest,omitempty"`
	// KeyRequestedAt asks for the key file that opens with the recovery password, in status.keyFile until KeyRequestedAt
	// is removed, for some minutes at most.
	KeyRequestedAt *metav1.Time `json:"keyRequestedAt,omitempty"`
}

// LocksRequest asks for a list of locks.
type LocksRequest struct {
	At metav1.Time `json:"at"`
	// RemoveStale deletes stale locks before.
	RemoveStale bool `json:"removeStale,omitempty"`
}

// VerifyEvery is the VerifyInterval; 0: never.
func (s *BackupTargetSpec) VerifyEvery() time.Duration {
	if s.VerifyInterval == nil {
		return DefaultVerifyInterval
	}
	return s.VerifyInterval.Duration
}

// Poll is the PollInterval; 0: never.
func (s *BackupTargetSpec) Poll() time.Duration {
	if s.PollInterval == nil {
		return DefaultPollInterval
	}
	return s.PollInterval.Duration
}

// Formats of stores.
const (
	FormatRestic   = "restic"
	FormatLonghorn = "longhorn"
)

// ExplainReadOnly says why Drover writes nothing into the store; empty: Drover writes.
func (t *BackupTarget) ExplainReadOnly() string {
	switch {
	case t.Status.Format == FormatLonghorn:
		return "is a store of Longhorn, in which Drover neither makes nor deletes backups; use another target"
	case t.Spec.ReadOnly:
		return "is read-only; set readOnly to false, or use another target"
	}
	return ""
}

// ConditionUnavailable is True on a BackupTarget that cannot be used; the reason is one of the reasons below.
const ConditionUnavailable = "Unavailable"

// ConditionDamaged is True on a BackupTarget whose repository lost bytes that backups need.
const ConditionDamaged = "Damaged"

// ConditionNoRecoveryKey is True on a BackupTarget whose repository has an own password and no other: a lost password
// is a lost repository.
const ConditionNoRecoveryKey = "NoRecoveryKey"

// Reasons of ConditionNoRecoveryKey.
const (
	ReasonOneKey      = "OnePassword"
	ReasonKeysSuffice = "NotNeeded"
)

// ConditionTooManyBackups is True on a BackupTarget whose store has more backups than may have a Backup.
const ConditionTooManyBackups = "TooManyBackups"

// HasUnlisted reports whether the store has backups without a Backup. Earlier versions write the condition alone.
func (t *BackupTarget) HasUnlisted() bool {
	return t.Status.Unlisted > 0 || meta.IsStatusConditionTrue(t.Status.Conditions, ConditionTooManyBackups)
}

// Reasons of ConditionTooManyBackups.
const (
	ReasonTooManyBackups = "TooManyBackups"
	ReasonCountBounded   = "CountBounded"
)

// ConditionSweepFailed is True on a BackupTarget while no sweep can free the space of deleted backups, for a reason
// that only a person can end.
const ConditionSweepFailed = "SweepFailed"

// Reasons of ConditionSweepFailed.
const (
	ReasonSweepNotPermitted = "NotPermitted" // the credentials permit no deletion
	ReasonSweepFailed       = "Failed"
	ReasonSwept             = "Swept"
)

// ConditionWriteFailed is True on a BackupTarget whose store failed the last write of a backup or copy, and answers
// reads. The next backup or copy that is complete ends the condition.
const ConditionWriteFailed = "WriteFailed"

// Reasons of ConditionWriteFailed, besides ReasonDenied and ReasonNoRoom.
const (
	ReasonReadOnlyStore = "ReadOnlyFileSystem"
	ReasonWriteFailed   = "Failed"
	ReasonWritten       = "Written"
)

// ConditionLocked is True on a BackupTarget while the lock of another session, program or cluster delays a sweep or a
// deletion; the message names the holder.
const ConditionLocked = "Locked"

// Reasons of ConditionLocked.
const (
	ReasonSweepWaits    = "SweepWaits"
	ReasonDeletionWaits = "DeletionWaits"
	ReasonNotLocked     = "NotLocked"
)

// Reasons of ConditionDamaged.
const (
	ReasonBackupsDamaged = "BackupsDamaged"
	ReasonPartMissing    = "PartMissing" // of the store: many packs at once; nothing was marked
	ReasonNoDamage       = "NoDamage"
)

// Reasons of ConditionUnavailable.
const (
	ReasonAvailable        = "Available"
	ReasonBadURL           = "InvalidURL"
	ReasonBadSecret        = "InvalidSecret"
	ReasonUnreachable      = "Unreachable"
	ReasonDenied           = "AccessDenied"
	ReasonWrongPassword    = "WrongPassword"
	ReasonOtherRepository  = "OtherRepository"
	ReasonLostRepository   = "RepositoryLost"
	ReasonBadRepository    = "InvalidRepository"
	ReasonListIncomplete   = "ListIncomplete"
	ReasonNotInitialized   = "NotInitialized"
	ReasonReadOnlyAndEmpty = "ReadOnly"
)

// BackupTargetStatus is the fact.
type BackupTargetStatus struct {
	Available bool   `json:"available,omitempty"`
	Message   string `json:"message,omitempty"`
	OwnerID   string `json:"ownerID,omitempty"` // node that looks after the target
	// Format of the store, for life: restic for a repository, or longhorn for the backups of Longhorn, which Drover only
	// reads.
	Format string `json:"format,omitempty"`
	// RepositoryID names the repository, for life. A store with another repository is not used: forget the RepositoryID by
	// making the BackupTarget again.
	RepositoryID string `json:"repositoryID,omitempty"`
	// Encrypted is false while the repository has the published password, so that everybody who reads the store reads the
	// backups.
	Encrypted bool  `json:"encrypted,omitempty"`
	Backups   int32 `json:"backups,omitempty"` // in the store, of all clusters
	// Unlisted is how many of the backups in the store have no Backup: not yet, or because the target has too many, which
	// the condition TooManyBackups says.
	Unlisted     int32        `json:"unlisted,omitempty"`
	Usage        *UsageFact   `json:"usage,omitempty"`
	LastSyncedAt *metav1.Time `json:"lastSyncedAt,omitempty"`
	// SyncedRequest is the last SyncRequestedAt that was followed.
	SyncedRequest *metav1.Time `json:"syncedRequest,omitempty"`
	// Initializing is set while a node makes the repository.
	Initializing *TargetClaim `json:"initializing,omitempty"`
	// SweepRequested is when a backup was deleted, or failed, whose space may not be free yet: no sweep ended since, or
	// the last one left data of a session that had not ended, or was killed.
	SweepRequested *metav1.Time       `json:"sweepRequested,omitempty"`
	LastSweep      *SweepFact         `json:"lastSweep,omitempty"`
	Verification   *VerificationFact  `json:"verification,omitempty"`
	Locks          *LocksFact         `json:"locks,omitempty"`
	KeyFile        *KeyFileFact       `json:"keyFile,omitempty"`
	Conditions     []metav1.Condition `json:"conditions,omitempty"`
}

// UsageFact says how much a repository has, by its index, after a sweep or at a visit.
type UsageFact struct {
	At metav1.Time `json:"at"`
	// UsedBytes is the size of all chunks and lists of the repository in the store; UniqueBytes the same, with each one
	// that the store has several times counted once. Both have the data of deleted backups until the next sweep.
	UsedBytes   int64 `json:"usedBytes,omitempty"`
	UniqueBytes int64 `json:"uniqueBytes,omitempty"`
	// UsedText is UsedBytes for people.
	UsedText string `json:"usedText,omitempty"`
}

// ListedLocks bounds LocksFact.Locks.
const ListedLocks = 64

// LocksFact are the locks of the repository at one time.
type LocksFact struct {
	// Request is the LocksRequest that was followed.
	Request LocksRequest `json:"request"`
	Message string       `json:"message,omitempty"` // why it failed
	Removed int32        `json:"removed,omitempty"` // stale locks that were deleted
	Total   int32        `json:"total,omitempty"`
	Locks   []LockFact   `json:"locks,omitempty"` // the newest ones
}

// LockFact is a lock of a session that uses the repository.
type LockFact struct {
	Name     string `json:"name"`
	Program  string `json:"program"` // drover; restic stands for all others
	Hostname string `json:"hostname,omitempty"`
	Username string `json:"username,omitempty"`
	PID      int64  `json:"pid,omitempty"`
	// Since is the begin of the session, which restic does not tell.
	Since       *metav1.Time `json:"since,omitempty"`
	RefreshedAt *metav1.Time `json:"refreshedAt,omitempty"`
	Exclusive   bool         `json:"exclusive,omitempty"`
	Sweep       bool         `json:"sweep,omitempty"`
	Stale       bool         `json:"stale,omitempty"`
	Message     string       `json:"message,omitempty"` // why the lock cannot be read
}

// KeyFileFact is the key file that opens with the recovery password.
type KeyFileFact struct {
	Request metav1.Time `json:"request"` // the KeyRequestedAt that was followed
	Message string      `json:"message,omitempty"`
	// Name is that of the object in the folder keys, and the SHA-256 of Content.
	Name    string `json:"name,omitempty"`
	Content []byte `json:"content,omitempty"`
	// ShownUntil is when Content is removed, whether KeyRequestedAt stays or not.
	ShownUntil *metav1.Time `json:"shownUntil,omitempty"`
}

// VerificationParts is in how many parts a verification reads a repository.
const VerificationParts = 30

// VerificationFact is the verification in progress, and the result of the last one.
type VerificationFact struct {
	// Request is the last VerifyRequestedAt that a verification began for; Asked says that this one is in progress.
	Request *metav1.Time `json:"request,omitempty"`
	Asked   bool         `json:"asked,omitempty"`
	// StartedAt is the begin of the verification in progress, in which Parts of 30 parts are complete. Position is the
	// name of the last pack that was read.
	StartedAt   *metav1.Time `json:"startedAt,omitempty"`
	Parts       int32        `json:"parts,omitempty"`
	Position    string       `json:"position,omitempty"`
	PartEndedAt *metav1.Time `json:"partEndedAt,omitempty"`
	Packs       int64        `json:"packs,omitempty"` // or blocks of Longhorn, read so far, or by the last verification
	Bytes       int64        `json:"bytes,omitempty"`
	Message     string       `json:"message,omitempty"` // why a part failed
	// EndedAt is the end of the last verification of the whole repository.
	EndedAt *metav1.Time `json:"endedAt,omitempty"`
	// DamagedBlobs are needed by backups and damaged in every pack; HealedBlobs were found on disks of nodes.
	DamagedBlobs int64 `json:"damagedBlobs,omitempty"`
	HealedBlobs  int64 `json:"healedBlobs,omitempty"`
	// DamageFoundAt is the last look for damage, if it found any. Each node then looks for the damaged blobs on its disks.
	DamageFoundAt *metav1.MicroTime `json:"damageFoundAt,omitempty"`
	// UncheckedBlobs were healed since: another look for damage follows.
	UncheckedBlobs int64 `json:"uncheckedBlobs,omitempty"`
	// BlobNames and ObjectNames are some of the damaged blobs and of the damaged or missing objects of the store.
	BlobNames   []string `json:"blobNames,omitempty"`
	ObjectNames []string `json:"objectNames,omitempty"`
	// DamagedBackups is how many backups need damaged blobs, or lost their own description; BackupNames are some of them.
	DamagedBackups int32    `json:"damagedBackups,omitempty"`
	BackupNames    []string `json:"backupNames,omitempty"`
}

// TargetClaim says which node does something that a single node may do, since when.
type TargetClaim struct {
	Node  string      `json:"node"`
	Since metav1.Time `json:"since"`
}

// SweepFact is the outcome of the last sweep, which frees the space of deleted backups.
type SweepFact struct {
	EndedAt    metav1.Time `json:"endedAt,omitempty"`
	FreedBytes int64       `json:"freedBytes,omitempty"`
	Message    string      `json:"message,omitempty"` // why the sweep failed, or waits
}

// BackupTargetList is a list of BackupTarget.
//
// +kubebuilder:object:root=true
type BackupTargetList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []BackupTarget `json:"items"`
}

// DefaultPollInterval is the interval of a target that names none.
const DefaultPollInterval = 5 * time.Minute

// TargetURLs are the forms of URLs of stores: a folder that every node has, an NFS export, an SMB share, a bucket of
// S3, a container of Azure, a folder of an SSH server.
const TargetURLs = "file:///PATH, nfs://HOST:/PATH, cifs://HOST/SHARE/PATH, s3://BUCKET@REGION/PATH, " +
	"azblob://CONTAINER@core.windows.net/PATH or sftp://USER@HOST:PORT/PATH"

// TargetSchemes are the schemes of TargetURLs, with their other names.
var TargetSchemes = []string{"file", "vfs", "nfs", "cifs", "smb", "s3", "azblob", "sftp"}

// DefaultVerifyInterval is the interval of a target that names none.
const DefaultVerifyInterval = 30 * 24 * time.Hour

// Keys of a target's Secret, as Longhorn names them, and the keys of the repository. A missing key is not used.
const (
	SecretAccessKey    = "AWS_ACCESS_KEY_ID"
	SecretSecretKey    = "AWS_SECRET_ACCESS_KEY"
	SecretSessionToken = "AWS_SESSION_TOKEN"
	SecretEndpoints    = "AWS_ENDPOINTS" // URL of the server; empty: Amazon's
	SecretCert         = "AWS_CERT"      // PEM: authorities that are trusted besides the system's
	SecretVirtualHost  = "VIRTUAL_HOSTED_STYLE"
	// SecretRole takes the place of the keys: the node's identity, or the machine's role, gives credentials.
	SecretRole = "AWS_IAM_ROLE_ARN"

	SecretAzureAccount  = "AZBLOB_ACCOUNT_NAME"
	SecretAzureKey      = "AZBLOB_ACCOUNT_KEY"
	SecretAzureEndpoint = "AZBLOB_ENDPOINT" // URL of the account's blob service; empty: Azure's
	SecretAzureCert     = "AZBLOB_CERT"     // PEM: authorities that are trusted besides the system's

	SecretHTTPProxy  = "HTTP_PROXY"
	SecretHTTPSProxy = "HTTPS_PROXY"
	SecretNoProxy    = "NO_PROXY"

	SecretSFTPPassword   = "SFTP_PASSWORD"
	SecretSFTPKey        = "SFTP_PRIVATE_KEY"
	SecretSFTPPassphrase = "SFTP_PRIVATE_KEY_PASSPHRASE"
	SecretKnownHosts     = "SFTP_KNOWN_HOSTS" // lines of known_hosts with the keys of the server

	SecretCIFSUser     = "CIFS_USERNAME" // of an SMB share; empty: a guest
	SecretCIFSPassword = "CIFS_PASSWORD"
	// SecretBackupPassword is the password of the repository; without it, the repository has the published password.
	SecretBackupPassword = "BACKUP_PASSWORD"
	// SecretResticPassword is another name of SecretBackupPassword.
	SecretResticPassword = "RESTIC_PASSWORD"
	// SecretOldBackupPassword is the password that SecretBackupPassword replaces: its key file is deleted.
	SecretOldBackupPassword = "BACKUP_PASSWORD_OLD"
	// SecretOldResticPassword is another name of SecretOldBackupPassword.
	SecretOldResticPassword = "RESTIC_PASSWORD_OLD"
	// SecretRecoveryPassword is a second password of the repository.
	SecretRecoveryPassword = "BACKUP_RECOVERY_PASSWORD"
)

// PublishedPassword is the password of a repository whose target has none: whoever reads the store can read the
// backups.
const PublishedPassword = "drover"

// NewRequest is the time of a request after the last one: the API keeps seconds, and each request is a new value.
func NewRequest(last *metav1.Time) metav1.Time {
	now := metav1.NewTime(time.Now().Truncate(time.Second))
	if last != nil && !last.Before(&now) {
		return metav1.NewTime(last.Add(time.Second))
	}
	return now
}
