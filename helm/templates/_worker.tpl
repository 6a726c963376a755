{{/* A pool of workers. All templates take (dict "root" $ "role" "prefill" or "decode"). */}}

{{/* Workers with one pod are a Deployment. Workers with several pods are a StatefulSet or, if `leaderWorkerSet` is set, a LeaderWorkerSet. */}}
{{- define "kvrelay.worker.deployment" -}}
{{- $values := index .root.Values .role -}}
{{- $nodes := include "kvrelay.worker.nodes" . | int -}}
{{- $kind := include "kvrelay.worker.kind" . -}}
apiVersion: {{ ternary "leaderworkerset.x-k8s.io/v1" "apps/v1" (eq $kind "LeaderWorkerSet") }}
kind: {{ $kind }}
metadata:
  name: {{ include "kvrelay.component.fullname" . }}
  labels:
    {{- include "kvrelay.component.labels" . | nindent 4 }}
spec:
  {{- if eq $kind "StatefulSet" }}
  # Of each group of neighbouring pods, the first is the worker. All pods start and end at once.
  replicas: {{ mul $values.replicas $nodes }}
  {{- else }}
  {{- with include "kvrelay.component.replicas" . }}
  {{- . | nindent 2 }}
  {{- end }}
  {{- end }}
  {{- if eq $kind "LeaderWorkerSet" }}
  leaderWorkerTemplate:
    size: {{ $nodes }}
    restartPolicy: RecreateGroupOnPodRestart
    workerTemplate:
      {{- include "kvrelay.worker.pod" . | nindent 6 }}
  {{- else }}
  selector:
    matchLabels:
      {{- include "kvrelay.component.selectorLabels" . | nindent 6 }}
  {{- if eq $kind "StatefulSet" }}
  serviceName: {{ include "kvrelay.component.fullname" . }}
  podManagementPolicy: Parallel
  updateStrategy: {type: RollingUpdate}
  {{- else }}
  {{- include "kvrelay.component.strategy" . | nindent 2 }}
  # A roll-out has not failed as long as a model may load, or its image be fetched.
  progressDeadlineSeconds: {{ add $values.startupSeconds 600 }}
  {{- end }}
  template:
    {{- include "kvrelay.worker.pod" . | nindent 4 }}
  {{- end }}
{{- end -}}

{{- define "kvrelay.worker.pod" -}}
{{- $values := index .root.Values .role -}}
{{- $control := ternary 7100 7200 (eq .role "prefill") -}}
{{- $admin := ternary 7180 7280 (eq .role "prefill") -}}
{{- $drain := include "kvrelay.component.drainSeconds" . | int -}}
{{- $nodes := include "kvrelay.worker.nodes" . | int -}}
{{- $name := include "kvrelay.component.fullname" . -}}
metadata:
  labels:
    {{- include "kvrelay.component.labels" . | nindent 4 }}
    {{- if gt $nodes 1 }}
    # Gateways find workers by this label.
    kvrelay.dev/nodes-per-worker: {{ $nodes | quote }}
    {{- end }}
    {{- with $values.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with $values.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- include "kvrelay.component.podSpec" . | nindent 2 }}
  # The drain, then time to end requests that could not finish.
  terminationGracePeriodSeconds: {{ add $drain 15 }}
  containers:
    - name: worker
      image: {{ include "kvrelay.image" (dict "root" .root "which" "worker" "suffix" (ternary "-cpu" "" (empty $values.gpu.resource))) }}
      imagePullPolicy: {{ .root.Values.image.pullPolicy }}
      args: [{{ .role }}-worker]
      env:
        - name: POD_IP
          valueFrom: {fieldRef: {fieldPath: status.podIP}}
        - name: KVRELAY_WORKER_ID
          valueFrom: {fieldRef: {fieldPath: metadata.name}}
        {{- with .model }}
        - name: KVRELAY_SERVED_MODEL_NAME
          value: {{ . | quote }}
        {{- end }}
        - name: KVRELAY_ADDRESS
          value: tcp://$(POD_IP):{{ $control }}
        {{- if eq .role "decode" }}
        - name: KVRELAY_DATA_ADDRESS
          value: tcp://$(POD_IP):7201
        {{- if and (include "kvrelay.noPrefill" .root.Values) (not (hasKey $values.settings "images")) }}
        - name: KVRELAY_IMAGES
          value: "true"
        {{- end }}
        {{- end }}
        - name: KVRELAY_ADMIN_HOST
          value: $(POD_IP)
        - name: KVRELAY_ADMIN_PORT
          value: {{ $admin | quote }}
        - name: KVRELAY_TENSOR_PARALLEL
          value: {{ $values.tensorParallel | int64 | quote }}
        - name: KVRELAY_PIPELINE_PARALLEL
          value: {{ $values.pipelineParallel | int64 | quote }}
        {{- if gt $nodes 1 }}
        - name: KVRELAY_NODES
          value: {{ $nodes | quote }}
        {{- if eq (include "kvrelay.worker.kind" .) "LeaderWorkerSet" }}
        # The LeaderWorkerSet's operator puts the variables that these refer to before all others.
        - name: KVRELAY_NODE_RANK
          value: $(LWS_WORKER_INDEX)
        - name: KVRELAY_LEADER_ADDRESS
          value: tcp://$(LWS_LEADER_ADDRESS):{{ add $control 2 }}
        {{- else }}
        - name: KVRELAY_NODE_NAME
          valueFrom: {fieldRef: {fieldPath: metadata.name}}
        - name: KVRELAY_LEADER_ADDRESS
          value: tcp://{leader}.{{ $name }}:{{ add $control 2 }}
        {{- end }}
        {{- end }}
        {{- if not $values.gpu.resource }}
        - name: KVRELAY_DEVICE
          value: cpu
        {{- end }}
        {{- if .root.Values.security.keys.enabled }}
        {{- include "kvrelay.keys.env" .root | nindent 8 }}
        {{- else }}
        - name: KVRELAY_INSECURE
          value: "true"
        {{- end }}
        {{- if .root.Values.sameHost.hostPath }}
        {{- if $values.settings.shared_memory }}
        {{- fail (printf "%s.settings.shared_memory and sameHost.hostPath say different things; leave one of them out" .role) }}
        {{- end }}
        - name: KVRELAY_SHARED_MEMORY
          value: /run/kvrelay
        {{- end }}
        {{- if not $values.settings.log_format }}
        - name: KVRELAY_LOG_FORMAT
          value: json
        {{- end }}
        {{- if include "kvrelay.adapters.given" .root.Values.adapters }}
        {{- include "kvrelay.adapters.onePlace" (dict "role" .role "settings" $values.settings) }}
        {{- end }}
        {{- include "kvrelay.model.env" .root | nindent 8 }}
        {{- with $values.settings }}
        {{- include "kvrelay.settings" . | trim | nindent 8 }}
        {{- end }}
        {{- with $values.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- with $values.extraEnvFrom }}
      envFrom:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      ports:
        - {name: control, containerPort: {{ $control }}}
        {{- if eq .role "decode" }}
        - {name: data, containerPort: 7201}
        {{- end }}
        - {name: admin, containerPort: {{ $admin }}}
        {{- if gt $nodes 1 }}
        - {name: ranks, containerPort: {{ add $control 2 }}}
        {{- end }}
      securityContext:
        {{- toYaml .root.Values.containerSecurityContext | nindent 8 }}
      resources:
        {{- include "kvrelay.worker.resources" $values | nindent 8 }}
      startupProbe:
        httpGet: {path: /health/ready, port: admin}
        periodSeconds: 2
        failureThreshold: {{ div $values.startupSeconds 2 }}
      readinessProbe:
        httpGet: {path: /health/ready, port: admin}
        periodSeconds: 2
      livenessProbe:
        httpGet: {path: /health/live, port: admin}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 3
      volumeMounts:
        {{- include "kvrelay.model.mounts" .root | nindent 8 }}
        {{- if include "kvrelay.adapters.given" .root.Values.adapters }}
        - name: adapters
          mountPath: /adapters
          readOnly: true
        {{- end }}
        - name: shm
          mountPath: /dev/shm
        {{- if .root.Values.sameHost.hostPath }}
        - name: same-host
          mountPath: /run/kvrelay
        {{- end }}
        {{- with include "kvrelay.keys.mount" .root }}
        {{- . | nindent 8 }}
        {{- end }}
        {{- with $values.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    {{- include "kvrelay.model.volumes" .root | nindent 4 }}
    {{- if include "kvrelay.adapters.given" .root.Values.adapters }}
    {{- include "kvrelay.adapters.volume" (dict "name" "adapters" "adapters" .root.Values.adapters) | nindent 4 }}
    {{- end }}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ $values.sharedMemory }}}
    {{- with .root.Values.sameHost.hostPath }}
    - name: same-host
      hostPath:
        path: {{ . }}
        type: Directory
    {{- end }}
    {{- with include "kvrelay.keys.volume" . }}
    {{- . | nindent 4 }}
    {{- end }}
    {{- with $values.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{/* The number of pods of each worker; fails on impossible values. */}}
{{- define "kvrelay.worker.nodes" -}}
{{- $values := index .root.Values .role -}}
{{- $nodes := $values.nodesPerWorker | int -}}
{{- $ranks := mul $values.tensorParallel $values.pipelineParallel | int -}}
{{- if mod $ranks $nodes -}}
{{- $fitting := list -}}
{{- range $count := untilStep 1 (int (add $ranks 1)) 1 -}}
{{- if not (mod $ranks $count) -}}
{{- $fitting = append $fitting $count -}}
{{- end -}}
{{- end -}}
{{- fail (printf "%s.nodesPerWorker is %d, and %s.tensorParallel times pipelineParallel is %d, which %d pods do not divide; take %s pods, or another number of ranks" .role $nodes .role $ranks $nodes (join ", " $fitting)) -}}
{{- end -}}
{{- $kind := include "kvrelay.worker.kind" . -}}
{{- if and (eq $kind "StatefulSet") (or $values.autoscaling.hpa.enabled $values.autoscaling.keda.enabled) -}}
{{- fail (printf "%s.autoscaling: an autoscaler counts pods, and a worker is %d of them here, so it would leave workers in parts; set %s.replicas, leaderWorkerSet to true, or nodesPerWorker to 1" .role $nodes .role) -}}
{{- end -}}
{{- if and (eq $nodes 1) $values.leaderWorkerSet -}}
{{- fail (printf "%s.leaderWorkerSet is for workers of several pods; set %s.nodesPerWorker, or leave it out" .role .role) -}}
{{- end -}}
{{- $name := include "kvrelay.component.fullname" . -}}
{{- $longest := ternary 48 52 (eq $kind "LeaderWorkerSet") -}}
{{- if and (gt $nodes 1) (gt (len $name) $longest) -}}
{{- fail (printf "%s is too long a name for a %s, which may have %d characters; %s.nodesPerWorker needs a shorter release, or fullnameOverride" $name $kind $longest .role) -}}
{{- end -}}
{{- $nodes -}}
{{- end -}}

{{/* The kind of object that a component's pods belong to. */}}
{{- define "kvrelay.worker.kind" -}}
{{- $values := index .root.Values .role -}}
{{- if le ($values.nodesPerWorker | int) 1 -}}
Deployment
{{- else -}}
{{- ternary "LeaderWorkerSet" "StatefulSet" $values.leaderWorkerSet -}}
{{- end -}}
{{- end -}}

{{/* A GPU for each rank of a pod, as a limit, which Kubernetes also takes as the request. */}}
{{- define "kvrelay.worker.resources" -}}
{{- $resources := deepCopy .resources -}}
{{- if .gpu.resource -}}
{{- $limits := merge (dict .gpu.resource (div (mul .tensorParallel .pipelineParallel) .nodesPerWorker | int64)) (default (dict) $resources.limits) -}}
{{- $_ := set $resources "limits" $limits -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{- define "kvrelay.worker.service" -}}
apiVersion: v1
kind: Service
metadata:
  name: {{ include "kvrelay.component.fullname" . }}
  labels:
    {{- include "kvrelay.component.labels" . | nindent 4 }}
spec:
  clusterIP: None
  {{- if gt (include "kvrelay.worker.nodes" . | int) 1 }}
  # The pods of a worker must find each other before the worker is ready.
  publishNotReadyAddresses: true
  {{- end }}
  selector:
    {{- include "kvrelay.component.selectorLabels" . | nindent 4 }}
  ports:
    - {name: control, port: {{ ternary 7100 7200 (eq .role "prefill") }}, targetPort: control}
    - {name: admin, port: {{ ternary 7180 7280 (eq .role "prefill") }}, targetPort: admin}
{{- end -}}

{{- define "kvrelay.worker.networkpolicy" -}}
{{- if .root.Values.networkPolicy.enabled -}}
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  name: {{ include "kvrelay.component.fullname" . }}
  labels:
    {{- include "kvrelay.component.labels" . | nindent 4 }}
spec:
  podSelector:
    matchLabels:
      {{- include "kvrelay.component.selectorLabels" . | nindent 6 }}
  policyTypes: [Ingress, Egress]
  ingress:
    - from:
        - podSelector:
            matchLabels:
              {{- include "kvrelay.component.selectorLabels" (dict "root" .root "role" "gateway") | nindent 14 }}
      ports:
        - {port: control, protocol: TCP}
    {{- if eq .role "decode" }}
    - from:
        - podSelector:
            matchLabels:
              {{- include "kvrelay.component.selectorLabels" (dict "root" .root "role" "prefill" "model" .model) | nindent 14 }}
      ports:
        - {port: control, protocol: TCP}
        - {port: data, protocol: TCP}
    {{- end }}
    {{- with include "kvrelay.networkpolicy.nodes" (merge (dict "direction" "from") .) }}
    {{- . | nindent 4 }}
    {{- end }}
    {{- include "kvrelay.networkpolicy.scrape" (dict "root" .root "port" "admin") | nindent 4 }}
  egress:
    {{- include "kvrelay.networkpolicy.dns" . | nindent 4 }}
    {{- with include "kvrelay.networkpolicy.nodes" (merge (dict "direction" "to") .) }}
    {{- . | nindent 4 }}
    {{- end }}
    {{- if eq .role "prefill" }}
    - to:
        - podSelector:
            matchLabels:
              {{- include "kvrelay.component.selectorLabels" (dict "root" .root "role" "decode" "model" .model) | nindent 14 }}
      ports:
        - {port: control, protocol: TCP}
        - {port: data, protocol: TCP}
    {{- end }}
    {{- include "kvrelay.networkpolicy.download" .root | nindent 4 }}
    {{- with .root.Values.networkPolicy.extraEgress }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}
{{- end -}}

{{/* Ranks of several pods connect on ports that they choose when they start. */}}
{{- define "kvrelay.networkpolicy.nodes" -}}
{{- if gt (include "kvrelay.worker.nodes" . | int) 1 -}}
- {{ .direction }}:
    - podSelector:
        matchLabels:
          {{- include "kvrelay.component.selectorLabels" . | nindent 10 }}
{{- end -}}
{{- end -}}

{{- define "kvrelay.networkpolicy.scrape" -}}
- from:
    {{- if .root.Values.networkPolicy.scrapers }}
    {{- toYaml .root.Values.networkPolicy.scrapers | nindent 4 }}
    {{- else }}
    - podSelector: {}
    {{- end }}
  ports:
    - {port: {{ .port }}, protocol: TCP}
{{- end -}}

{{- define "kvrelay.networkpolicy.dns" -}}
- ports:
    - {port: 53, protocol: UDP}
    - {port: 53, protocol: TCP}
{{- end -}}

{{/* Egress for downloading the model, if it is downloaded. */}}
{{- define "kvrelay.networkpolicy.download" -}}
{{- if eq .Values.model.source "huggingface" -}}
- ports:
    - {port: 443, protocol: TCP}
{{- end -}}
{{- end -}}
