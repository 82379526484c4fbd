package planner

import (
	"cmp"
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/metrics"

	"drover.io/drover/api"
	"drover.io/drover/api/watch"
)

// backupFacts exports the backups of the volumes of this cluster from the controller's cache. Series have volumes and
// targets as labels, never backups; the backups of other clusters in a store have no series, because a store may have
// any number.
type backupFacts struct {
	once   sync.Once
	reader atomic.Pointer[client.Reader]
}

var facts backupFacts

var (
	factLabels = []string{"volume", "target"}
	descLast   = prometheus.NewDesc("drover_backup_last_at",
		"Instant of the content of the volume's newest whole backup in the target, in seconds since 1970; 0: there is none.",
		factLabels, nil)
	descState = prometheus.NewDesc("drover_backup_state", "1 for the state of the volume's newest backup in the target.",
		[]string{"volume", "target", "state"}, nil)
	descBytes = prometheus.NewDesc("drover_backup_actual_size_bytes",
		"Bytes that the volume's backups in the target added to the store.", factLabels, nil)
)

// setupMetrics puts the planner's metrics into the registry of controller-runtime.
func setupMetrics(reader client.Reader) (err error) {
	facts.reader.Store(&reader)
	facts.once.Do(func() { err = metrics.Registry.Register(&facts) })
	return err
}

// Describe implements prometheus.Collector.
func (*backupFacts) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{descLast, descState, descBytes} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (f *backupFacts) Collect(ch chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	reader := *f.reader.Load()
	var volumes api.VolumeList
	if err := reader.List(ctx, &volumes, client.UnsafeDisableDeepCopy); err != nil {
		ch <- prometheus.NewInvalidMetric(descLast, err)
		return
	}
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	for i := range volumes.Items {
		v := &volumes.Items[i]
		var list api.BackupList
		if err := reader.List(ctx, &list, client.MatchingFields{watch.ByVolume: v.Name},
			client.UnsafeDisableDeepCopy); err != nil {
			ch <- prometheus.NewInvalidMetric(descLast, err)
			return
		}
		for target, s := range summarizeTargets(v, list.Items) {
			gauge(descLast, api.InstantSeconds(s.lastAt), v.Name, target)
			gauge(descState, 1, v.Name, target, string(s.state))
			gauge(descBytes, float64(s.bytes), v.Name, target)
		}
	}
}

// targetSummary says how well a target protects a volume.
type targetSummary struct {
	lastAt string          // instant of the newest whole backup, RFC 3339; empty: none
	state  api.BackupState // of the newest backup
	bytes  int64           // that the backups added to the store
}

// summarizeTargets returns a summary for each target with backups of a volume. A backup without an end counts by its
// volume's name, because it has no UID yet.
func summarizeTargets(v *api.Volume, backups []api.Backup) map[string]targetSummary {
	all := map[string]targetSummary{}
	newest, whole := map[string]*api.Backup{}, map[string]*api.Backup{}
	for i := range backups {
		b := &backups[i]
		if b.Status.VolumeUID != "" && b.Status.VolumeUID != v.Status.UID || b.DeletionTimestamp != nil ||
			b.Status.VolumeUID == "" && b.FoundSnapshot() != "" {
			continue
		}
		target := b.Target()
		s := all[target]
		s.bytes += b.Status.NewlyUploadDataSize
		if last := whole[target]; b.ProtectsVolume(v) && (last == nil || b.NewerThan(last)) {
			whole[target], s.lastAt = b, b.CutText()
		}
		if last := newest[target]; last == nil || startOf(b).After(startOf(last)) {
			newest[target], s.state = b, cmp.Or(b.Status.State, api.BackupPending)
		}
		all[target] = s
	}
	return all
}

// startOf is when a backup was asked for; of a found one, the instant of its snapshot.
func startOf(b *api.Backup) time.Time {
	if b.FoundSnapshot() != "" {
		return b.CutAt()
	}
	return b.CreationTimestamp.Time
}
