// Package backlog holds the queues in which objects wait for the reconcilers of all rooms: controller-runtime's
// priority queue, but without that queue's metrics, which wake the process twice a second per reconciler until the
// process ends. A scrape of drover_loop_backlog counts the waiting objects.
//
// Each queue owns its goroutines and ends them in ShutDown.
package backlog

import (
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/controller/priorityqueue"
	"sigs.k8s.io/controller-runtime/pkg/metrics"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

// Queue holds the requests of one reconciler.
type Queue = workqueue.TypedRateLimitingInterface[reconcile.Request]

// RateLimiter backs off after errors for 15 seconds at most: the usual cause is another part in the middle of a
// restart.
func RateLimiter() workqueue.TypedRateLimiter[reconcile.Request] {
	return workqueue.NewTypedItemExponentialFailureRateLimiter[reconcile.Request](50*time.Millisecond, 15*time.Second)
}

// New makes the queue of a reconciler: the NewQueue of a controller's options.
func New(loop string, limiter workqueue.TypedRateLimiter[reconcile.Request]) Queue {
	q := &queue{loop: loop, PriorityQueue: priorityqueue.New("", func(o *priorityqueue.Opts[reconcile.Request]) {
		o.RateLimiter = limiter
	})}
	open.Lock()
	defer open.Unlock()
	open.queues[q] = true
	return q
}

type queue struct {
	priorityqueue.PriorityQueue[reconcile.Request]
	loop string
}

// ShutDown ends the queue.
func (q *queue) ShutDown() {
	open.Lock()
	delete(open.queues, q)
	open.Unlock()
	q.PriorityQueue.ShutDown()
}

// ShutDownWithDrain ends the queue when all taken requests are done.
func (q *queue) ShutDownWithDrain() {
	open.Lock()
	delete(open.queues, q)
	open.Unlock()
	q.PriorityQueue.ShutDownWithDrain()
}

// open lists the queues of this process.
var open = struct {
	sync.Mutex
	queues map[*queue]bool
}{queues: map[*queue]bool{}}

var length = prometheus.NewDesc("drover_loop_backlog", "Objects that wait for a reconciler.",
	[]string{"loop"}, nil)

// lengths is the metric.
type lengths struct{}

func (lengths) Describe(c chan<- *prometheus.Desc) { c <- length }

func (lengths) Collect(c chan<- prometheus.Metric) {
	open.Lock()
	sum := map[string]int{}
	for q := range open.queues {
		sum[q.loop] += q.Len()
	}
	open.Unlock()
	for loop, n := range sum {
		c <- prometheus.MustNewConstMetric(length, prometheus.GaugeValue, float64(n), loop)
	}
}

func init() { metrics.Registry.MustRegister(lengths{}) }
