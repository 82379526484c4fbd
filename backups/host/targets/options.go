package targets

import (
	"context"
	"log/slog"
	"time"

	"drover.io/drover/backups/longhorn"
	"drover.io/drover/backups/repo"
	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/backups/target"
	"drover.io/drover/backups/target/share"
)

// Options of the work for BackupTargets. The zero value of a field stands for its default.
type Options struct {
	Log *slog.Logger
	// Cache is the folder for the index tables of repositories; one folder for each target below.
	Cache string
	// Mounts is the folder where shares of file servers are mounted for a moment.
	Mounts string
	// Now is the clock of intervals; time.Now.
	Now func() time.Time
	// Retry is the interval between two attempts after a failure; 1 min.
	Retry time.Duration
	// Confirm is the least interval between two lists that agree on the loss of a backup; 1 min.
	Confirm time.Duration
	// SweepDelay is how long a sweep waits for further deletions; 30 s.
	SweepDelay time.Duration
	// SweepPoll is the interval of a sweep between two looks at the sessions that the sweep waits for; 5 s.
	SweepPoll time.Duration
	// RecordAge is how long a repository that had snapshots before Drover's first list waits for the first sweep; 10 min.
	RecordAge time.Duration
	// Memory of all works of the node; NewMemory(0).
	Memory *Memory
	// RecheckDelay is how long a look for damage waits for further nodes after a node healed blobs; 1 min.
	RecheckDelay time.Duration
	// VerifyRate bounds a verification, in bytes for each second; 64 MiB.
	VerifyRate int64
	// MostBackups bounds the objects of a target for backups that were found in the store; 20,000.
	MostBackups int
	// Heal writes blobs again that snapshots of a repository lost, as far as the node's disks have them, and returns their
	// number, with an error, too; nil: no disk is asked.
	Heal func(ctx context.Context, r *repo.Repository, snapshots []blob.ID, o repo.WriterOptions) (int64, error)
	// Images finds the backing images below backups of Longhorn; nil: such backups are refused.
	Images *longhorn.Images
	// OpenStore opens the store of a URL with the credentials of a Secret; address.Parse and Open.
	OpenStore func(ctx context.Context, url string, secret map[string][]byte) (target.Store, error)
}

// sweepRetry is the interval between two sweeps after a failure that needs a person.
const sweepRetry = time.Hour

// leftTime is the pause before a sweep is repeated that left packs of running sessions: the lock of a session that was
// killed is stale then, and packs that no snapshot needs are garbage.
const (
	leftTime     = 31 * time.Minute
	mostLeftTime = 24 * time.Hour
)

// Times of the claim of a node that makes a repository: how long the node may take, and how long others respect the
// claim.
const (
	initTime  = 2 * time.Minute
	claimTime = 5 * time.Minute
)

func (o Options) withDefaults() Options {
	if o.Log == nil {
		o.Log = slog.Default()
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	if o.OpenStore == nil {
		o.OpenStore = addressOpener(share.NewMounts(o.Mounts), o.Log)
	}
	if o.Memory == nil {
		o.Memory = NewMemory(0)
	}
	if o.MostBackups <= 0 {
		o.MostBackups = 20_000
	}
	if o.VerifyRate <= 0 {
		o.VerifyRate = 64 << 20
	}
	if o.SweepDelay <= 0 {
		o.SweepDelay = 30 * time.Second
	}
	if o.RecordAge <= 0 {
		o.RecordAge = 10 * time.Minute
	}
	for _, d := range []*time.Duration{&o.Retry, &o.Confirm, &o.RecheckDelay} {
		if *d <= 0 {
			*d = time.Minute
		}
	}
	return o
}
