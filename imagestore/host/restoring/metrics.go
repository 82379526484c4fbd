package restoring

import (
	"github.com/prometheus/client_golang/prometheus"
	"sigs.k8s.io/controller-runtime/pkg/metrics"
)

var restoredBytes = prometheus.NewCounterVec(prometheus.CounterOpts{Name: "drover_restored_bytes_total",
	Help: "Bytes that restores of backups wrote, from the store, or from layers on the disks of this node."},
	[]string{"source"})

func init() {
	metrics.Registry.MustRegister(restoredBytes)
}
