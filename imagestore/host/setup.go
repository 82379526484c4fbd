package host

import (
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	ctrlsource "sigs.k8s.io/controller-runtime/pkg/source"

	"drover.io/drover/api"
	"drover.io/drover/api/backlog"
	"drover.io/drover/block"
	"drover.io/drover/imagestore/host/restoring"
	"drover.io/drover/imagestore/origin/upload"
)

// Setup adds the reconciler of a node's ImageCopies to a manager whose cache has the indexes of api/watch. disks finds
// a disk of the node by its UID.
func Setup(mgr ctrl.Manager, nodeName string, disks func(api.UID) (block.Layers, error), o Options) error {
	o = o.withDefaults()
	uploads, err := upload.Listen(o.UploadListen, o.UploadHost, o.UploadCert)
	if err != nil {
		return err
	}
	uploads.ResumeTimeout = o.UploadTimeout
	n := &copyReconciler{Client: mgr.GetClient(), live: mgr.GetAPIReader(), node: nodeName, disks: disks, opts: o,
		uploads: uploads, events: mgr.GetEventRecorder("drover-node-images"), log: o.Log.With("loop", "image-copies"),
		transfers: newTransferSet(o.Parallel, o.ProgressEvery), records: map[string]*statusRecord{},
		verifications: map[string]verification{}, suspects: map[string]bool{}}
	n.restoring = restoring.NewSet(restoring.Options{Log: o.Log, PauseMin: o.RetryMin / 5, Stall: o.RestoreStall,
		Disks: n.localDisks, Attached: n.attachedLayers})
	for _, r := range []manager.Runnable{uploads, n.restoring} {
		if err := mgr.Add(r); err != nil {
			return err
		}
	}
	if err := mgr.Add(n.transfers); err != nil {
		return err
	}
	if o.Layers != nil && o.Identity != nil {
		if err := n.serveLayers(mgr, o.Layers, o.Identity); err != nil {
			return err
		}
	}
	mine := predicate.NewPredicateFuncs(func(o client.Object) bool {
		c, ok := o.(*api.ImageCopy)
		return ok && c.Spec.Node == nodeName
	})
	everyNode := false
	return ctrl.NewControllerManagedBy(mgr).Named("image-copies").For(&api.ImageCopy{}, builder.WithPredicates(mine)).
		WatchesRawSource(ctrlsource.Channel(n.transfers.wake, &handler.EnqueueRequestForObject{})).
		Watches(&api.Node{}, handler.Funcs{UpdateFunc: n.wakeCopiesOfDisks}).
		Watches(&api.BackupTarget{}, handler.Funcs{UpdateFunc: n.askHealed}).
		WithOptions(controller.Options{MaxConcurrentReconciles: 4, NeedLeaderElection: &everyNode, NewQueue: backlog.New}).
		Complete(n)
}
