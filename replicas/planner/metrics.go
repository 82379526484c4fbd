package planner

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/metrics"

	"drover.io/drover/api"
)

// volumeFacts exports metrics of every volume from the controller's cache.
type volumeFacts struct {
	once   sync.Once
	reader atomic.Pointer[client.Reader]
}

var facts volumeFacts

var (
	factLabels   = []string{"volume"}
	descCapacity = prometheus.NewDesc("drover_volume_capacity_bytes", "Size of the volume.", factLabels, nil)
	descActual   = prometheus.NewDesc("drover_volume_actual_size_bytes",
		"Bytes that the volume takes on its fullest disk: head and layers, shared ones included.", factLabels, nil)
	descState = prometheus.NewDesc("drover_volume_state", "1 for the volume's state.",
		[]string{"volume", "state"}, nil)
	descRobust = prometheus.NewDesc("drover_volume_robustness", "1 for the volume's robustness.",
		[]string{"volume", "robustness"}, nil)
	descLastBackup = prometheus.NewDesc("drover_volume_last_backup_at",
		"Instant of the content of the volume's newest whole backup, in seconds since 1970; 0: there is none.", factLabels,
		nil)
)

// setupMetrics puts the planner's metrics into the registry of controller-runtime.
func setupMetrics(reader client.Reader) (err error) {
	facts.reader.Store(&reader)
	facts.once.Do(func() { err = metrics.Registry.Register(&facts) })
	return err
}

// Describe implements prometheus.Collector.
func (*volumeFacts) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{descCapacity, descActual, descState, descRobust, descLastBackup} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (f *volumeFacts) Collect(ch chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	var list api.VolumeList
	if err := (*f.reader.Load()).List(ctx, &list, client.UnsafeDisableDeepCopy); err != nil {
		ch <- prometheus.NewInvalidMetric(descCapacity, err)
		return
	}
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	for i := range list.Items {
		v := &list.Items[i]
		gauge(descCapacity, float64(v.Status.Size), v.Name)
		gauge(descActual, float64(v.Status.Used), v.Name)
		gauge(descLastBackup, api.InstantSeconds(v.Status.LastBackupAt), v.Name)
		if v.Status.State != "" {
			gauge(descState, 1, v.Name, string(v.Status.State))
			gauge(descRobust, 1, v.Name, string(v.Status.Robustness))
		}
	}
}
