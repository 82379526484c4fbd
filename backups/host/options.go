package host

import (
	"context"
	"log/slog"
	"runtime"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api/watch"
	"drover.io/drover/backups/host/targets"
	"drover.io/drover/backups/mover"
	"drover.io/drover/backups/repo"
	"drover.io/drover/block"
	"drover.io/drover/block/budget"
	"drover.io/drover/block/pace"
)

// settingPlaces is the setting with the number of backups that the node makes at once.
const settingPlaces = "concurrent-backups-per-node"

// settingGuestSpeed is the setting with the part of their speed that guests keep, in percent.
const settingGuestSpeed = "backup-guest-speed-percentage"

// Options of the host. The zero value of a field stands for its default.
type Options struct {
	Log *slog.Logger
	// Version of Drover, for the snapshots of repositories.
	Version string
	// Guests counts the requests of the node's volumes; nil: backups and heals never wait for guests.
	Guests func(context.Context) (pace.GuestIO, error)
	// Memory bounds the buffers of all backups, restores, copies, sweeps, heals and verifications of the node, in bytes,
	// at least 192 MiB; 256 MiB.
	Memory int64
	// RetryMin and RetryMax bound the pause after a failure, which doubles with each failure: 5 s to 5 min.
	RetryMin, RetryMax time.Duration
	// ProgressEvery is the interval between two reports of the progress; 500 ms.
	ProgressEvery time.Duration
	// Targets are the options of the work for BackupTargets. Log is the same by default.
	Targets targets.Options
	// OpenDisk opens the disk inside the file of an image of Longhorn, as longhorn.Images has it; nil: backups of Longhorn
	// above images are refused.
	OpenDisk func(file block.Source) (block.Source, error)
	// CollectEvery is the interval between two looks for holds without a backup; 10 min.
	CollectEvery time.Duration
}

func (o Options) withDefaults() Options {
	if o.Log == nil {
		o.Log = slog.Default()
	}
	if o.Targets.Log == nil {
		o.Targets.Log = o.Log
	}
	if o.RetryMin <= 0 {
		o.RetryMin = 5 * time.Second
	}
	if o.RetryMax <= 0 {
		o.RetryMax = 5 * time.Minute
	}
	if o.ProgressEvery <= 0 {
		o.ProgressEvery = 500 * time.Millisecond
	}
	if o.CollectEvery <= 0 {
		o.CollectEvery = 10 * time.Minute
	}
	return o
}

// NewPacer makes the backups and heals of the node wait for guests.
func (o Options) NewPacer(c client.Reader) *pace.Pacer {
	if o.Guests == nil {
		return nil
	}
	o = o.withDefaults()
	return pace.New(pace.Options{Guests: o.Guests, Keep: func(ctx context.Context) float64 {
		return float64(min(watch.SettingNumber(ctx, c, settingGuestSpeed, o.Log), 95)) / 100
	}, Rested: func(d time.Duration) { backupPauses.Add(d.Seconds()) }})
}

const mostWorkers = 16

// ForTargets are the options of the work for BackupTargets.
func (o Options) ForTargets() targets.Options {
	o = o.withDefaults()
	if o.Targets.Memory == nil {
		o.Targets.Memory = targets.NewMemory(o.Memory)
	}
	return o.Targets
}

// shareMemory gives a backup its share of the memory of all backups.
func shareMemory(o *mover.BackupOptions, memory *budget.Part, places int) {
	o.Workers = min(2*runtime.GOMAXPROCS(0), mostWorkers)
	o.Writer = targets.WriterOf(memory, memory.Size()/int64(places), int64(o.Workers)*block.ChunkSize,
		repo.DefaultPackSize)
	o.Writer.Budget = nil // the places bound the backups: one more place helps at once, not after the running backups
}
