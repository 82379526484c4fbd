// Package protocol checks the replication and recovery protocol of docs/replication.md by visiting every state of a
// small model of it: two engines, two or three replicas, one region, a few writes and a bounded number of faults
// (killed engines that resume, crashed hosts, restarted replicas, power loss, late messages, false suspicion).
// Everything is in the tests; nothing here runs in the product. Each rule of the protocol can be taken out of the
// model, and a test shows that the explorer then finds the loss that the rule prevents.
package protocol
